"""How long a launch takes on a simulated clock, and that clock.

Owns the linear cost model, its profiles and logical time. Never sees a device. Both
executors can keep this clock, which is what makes their plan streams comparable.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from jaxserve.block_count import BlockCount
from jaxserve.config import EngineShape
from jaxserve.core import StepPlan
from jaxserve.executors.link import INSTANT, LinkCost, Links
from jaxserve.moves import STILL, Arrived, Moves, Transferred


class StepCost(Protocol):
    """How long one step takes."""

    def step_s(self, chunk_tokens: int, rows: int, context_tokens: int) -> float:
        """Seconds of a step.

        Args:
          chunk_tokens: prompt tokens computed. rows: decode rows listed, padding of a
            static batch included. context_tokens: KV rows that the decode rows attend
            to.
        """
        ...


@dataclasses.dataclass(frozen=True)
class LinearCost:
    """Seconds of one step, linear in what it computes.

    Attributes:
      fixed_s: of any step: launch overhead and reading the weights.
      token_s: of each token position: a prompt token or a listed decode row.
      context_token_s: of each KV row that the step's decode rows attend to.
      floor_s: a step that computes little takes this long, its context aside: the time
        to read the weights, under which computing hides.
    """

    fixed_s: float = 0.01
    token_s: float = 0.001
    context_token_s: float = 0.0
    floor_s: float = 0.0

    def step_s(self, chunk_tokens: int, rows: int, context_tokens: int) -> float:
        """Seconds of a step; see `StepCost`."""
        computing_s = self.fixed_s + self.token_s * (chunk_tokens + rows)
        return max(self.floor_s, computing_s) + self.context_token_s * context_tokens


PROFILES = Path(__file__).with_name("profiles.json")
"""Costs of real systems by name: the fields of `LinearCost`, where they come from, and
when."""


def get_profile(name: str) -> LinearCost:
    """The cost of a profile of PROFILES.

    Raises:
      ValueError: there is none of this name, or it does not hold four costs.
    """
    profiles = json.loads(PROFILES.read_text(encoding="utf-8"))
    if name not in profiles:
        raise ValueError(
            f"profile {name!r} must be one of {sorted(profiles)}; to measure another, "
            f"run experiments/fit_cost.py and add what it prints to {PROFILES}"
        )
    costs = {field.name: profiles[name].get(field.name) for field in _COSTS}
    for field, value in costs.items():
        real = isinstance(value, int | float) and not isinstance(value, bool)
        if not real or not 0 <= value < math.inf:
            raise ValueError(
                f"{field}={value!r} of profile {name!r} must be a number of seconds "
                f">= 0; correct {PROFILES}"
            )
    return LinearCost(**costs)


_COSTS = dataclasses.fields(LinearCost)


class LogicalClock:
    """Time that passes only by the cost of launches and by sleeping.

    finish(k) = max(finish(k - 1), submitted(k)) + the cost of the steps that ran.
    Reading launch k sets now to finish(k); submitting costs nothing. What a launch
    spills leaves when the launch starts, and holds nobody up.

    Args:
      shape, cost: of the engine. link: of the way to the host and back. disk: of the
        way from there to disk and back.
    """

    def __init__(
        self,
        shape: EngineShape,
        cost: StepCost,
        link: LinkCost = INSTANT,
        disk: LinkCost = INSTANT,
    ):
        self._cost = cost
        self._links = Links(link, disk)
        self._count = BlockCount(shape)
        self._slots = shape.max_slots
        self._steps = shape.decode_steps
        self._finish = 0.0
        self._now = 0.0

    def now(self) -> float:
        """Seconds since the start."""
        return self._now

    def sleep_until(self, t_s: float) -> None:
        """Let time pass while nothing runs."""
        self._now = max(self._now, t_s)

    def submit(self, moves: Moves) -> None:
        """A launch is submitted: what it fetches and loads leaves now."""
        self._links.submitted(moves, self._now)

    def arrived(self) -> Arrived:
        """What has been fetched, loaded and saved since the last call."""
        return self._links.arrived(self._now)

    def await_arrival(self, until_s: float) -> None:
        """Let time pass until the next order is done, or to until_s."""
        self.sleep_until(min(self._links.next_arrival_s, until_s))

    def timed(self) -> list[Transferred]:
        """Transfers that have ended since the last call."""
        return self._links.timed(self._now)

    def finish(
        self,
        plan: StepPlan,
        ran: np.ndarray,
        submitted_s: float,
        moves: Moves = STILL,
    ) -> int:
        """Let a launch that ran `ran` bool[N, R] pass; return its free blocks, before
        it restores any."""
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
        start_s = max(self._finish, submitted_s)
        self._links.started(moves, start_s)
        for order in moves.restore:
            self._count.resize(order.slot, order.length)
        self._finish = start_s + seconds
        self._now = max(self._now, self._finish)
        return free

    def leap(
        self, slots: Sequence[tuple[int, bool]], launches: int, until_s: float
    ) -> list[float]:
        """Let equal launches of decode rows alone pass, each planned when the one
        before it ends; return when each ended.

        Args:
          slots: of each listed row, and whether it runs all N steps or none.
          launches: how many at most. until_s: none is planned at this time or later.
        """
        active = [slot for slot, runs in slots if runs]
        context = sum(self._count.length[slot] for slot in active)
        ends: list[float] = []
        while len(ends) < launches and self._now < until_s:
            seconds = 0.0
            for _ in range(self._steps):
                context += len(active)
                seconds += self._cost.step_s(0, len(slots), context)
            self._finish = max(self._finish, self._now) + seconds
            self._now = self._finish
            ends.append(self._now)
        for slot in active:
            length = self._count.length[slot] + len(ends) * self._steps
            self._count.resize(slot, length)
        return ends
