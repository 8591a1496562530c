"""Runs the same plans with no device: known outputs, and a clock that a cost model
moves.

Owns the truth about every request's output, which no policy may see. Its free-block
count comes from the plans and the truth alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxserve.config import EngineShape
from jaxserve.core import StepOutput, StepPlan
from jaxserve.executors.cost_model import LinearCost, LogicalClock


class Truth(NamedTuple):
    """The output that a request would have, whatever the schedule."""

    tokens: Sequence[int]  # output token ids
    stops: bool  # the last one is a stop id, rather than max_tokens' last


class _Ticket(NamedTuple):
    output: StepOutput  # num_free is filled when it is read
    plan: StepPlan
    submitted_s: float


class SimExecutor:
    """An executor in logical time. It knows no log-probabilities: requests that ask for
    them get none.

    Args:
      shape: static sizes, as for a device.
      truth: by submission index; may grow while the engine runs.
      cost: seconds of a step.
    """

    compiles = 0

    def __init__(
        self, shape: EngineShape, truth: Mapping[int, Truth], cost: LinearCost
    ):
        self._shape = shape
        self._truth = truth
        self._clock = LogicalClock(shape, cost)
        self._sampled: dict[int, int] = {}  # tokens emitted so far, by submission index

    def now(self) -> float:
        """Logical seconds since the start."""
        return self._clock.now()

    def sleep_until(self, t_s: float) -> None:
        """Let logical time pass."""
        self._clock.sleep_until(t_s)

    def submit(self, plan: StepPlan, who: Sequence[int]) -> _Ticket:
        """Look up what the launch samples; time passes when it is read."""
        steps = self._shape.decode_steps
        tokens = np.zeros((steps, plan.rows), np.int32)
        ran = np.zeros((steps, plan.rows), bool)
        done = np.zeros(plan.rows, bool)
        for row, index in enumerate(who):
            allowed = int(plan.decode[row, 1])
            if allowed == 0:
                continue
            truth, start = self._truth[index], self._sampled.get(index, 0)
            new = truth.tokens[start : start + allowed]
            if len(new) < allowed and not (truth.stops and truth.tokens):
                raise ValueError(
                    f"truth[{index}] has {len(truth.tokens)} tokens and stops=False, "
                    f"but the request may sample {start + allowed}; give it more "
                    "tokens, stops=True, or the request fewer max_tokens"
                )
            tokens[: len(new), row] = new
            ran[: len(new), row] = True
            self._sampled[index] = start + len(new)
            done[row] = len(new) > 0 and start + len(new) == len(truth.tokens)
            done[row] &= truth.stops
        output = StepOutput(tokens=tokens, ran=ran, done=done, num_free=-1)
        return _Ticket(output, plan, self.now())

    def result(self, ticket: _Ticket) -> StepOutput:
        """Let the launch's time pass and count the free blocks after it."""
        output, plan, submitted_s = ticket
        free = self._clock.finish(plan, output.ran, submitted_s)
        return output._replace(num_free=free)
