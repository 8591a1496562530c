"""How long a launch takes on a simulated clock, and that clock.

Owns the linear cost model and logical time. Never sees a device. Both executors can
keep this clock, which is what makes their plan streams comparable.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxserve.block_count import BlockCount
from jaxserve.config import EngineShape
from jaxserve.core import StepPlan


@dataclasses.dataclass(frozen=True)
class LinearCost:
    """Seconds of one step, linear in what it computes.

    Attributes:
      fixed_s: of any step: launch overhead and reading the weights.
      token_s: of each token position: a prompt token or a listed decode row.
      context_token_s: of each KV row that the step's decode rows attend to.
    """

    fixed_s: float = 0.01
    token_s: float = 0.001
    context_token_s: float = 0.0

    def step_s(self, chunk_tokens: int, rows: int, context_tokens: int) -> float:
        """Seconds of a step of `rows` decode rows and `chunk_tokens` prompt tokens."""
        tokens = chunk_tokens + rows
        return (
            self.fixed_s + self.token_s * tokens + self.context_token_s * context_tokens
        )


class LogicalClock:
    """Time that passes only by the cost of launches and by sleeping.

    finish(k) = max(finish(k - 1), submitted(k)) + the cost of the steps that ran.
    Reading launch k sets now to finish(k); submitting costs nothing.
    """

    def __init__(self, shape: EngineShape, cost: LinearCost):
        self._cost = cost
        self._count = BlockCount(shape)
        self._slots = shape.max_slots
        self._finish = 0.0
        self._now = 0.0

    def now(self) -> float:
        """Seconds since the start."""
        return self._now

    def sleep_until(self, t_s: float) -> None:
        """Let time pass while nothing runs."""
        self._now = max(self._now, t_s)

    def finish(self, plan: StepPlan, ran: np.ndarray, submitted_s: float) -> int:
        """Let a launch that ran `ran` bool[N, R] pass; return its free blocks."""
        slots = plan.decode[:, 0].tolist()
        listed = [r for r, slot in enumerate(slots) if slot < self._slots]
        chunk_rows = int((plan.chunk_end > 0).sum())
        chunk_tokens = int((plan.chunk[:, 0] < self._slots).sum())
        free = self._count.replay(plan, ran)
        # After the replay a row's length counts its every step; walk back from the end.
        length = np.array([self._count.length[slots[r]] for r in listed], np.int64)
        ran = ran[:, listed]
        steps = max(int(ran.any(axis=1).sum()), 1 if plan.tokens else 0)
        seconds = 0.0
        for i in range(steps):
            later = ran[i + 1 :].sum(axis=0)
            decode = ran[i] & (plan.chunk_end[listed] == 0) if i == 0 else ran[i]
            context = int(((length - later) * decode).sum())
            rows = len(listed) - (chunk_rows if i == 0 else 0)
            seconds += self._cost.step_s(chunk_tokens if i == 0 else 0, rows, context)
        self._finish = max(self._finish, submitted_s) + seconds
        self._now = max(self._now, self._finish)
        return free
