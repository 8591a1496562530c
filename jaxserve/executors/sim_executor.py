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
from jaxserve.executors.base import Leap
from jaxserve.executors.cost_model import LogicalClock, StepCost
from jaxserve.executors.link import INSTANT, LinkCost
from jaxserve.moves import STILL, Arrived, Label, Moves, Transferred


class Truth(NamedTuple):
    """The output that a request would have, whatever the schedule."""

    tokens: Sequence[int]  # output token ids
    stops: bool  # the last one is a stop id, rather than max_tokens' last


class _Ticket(NamedTuple):
    output: StepOutput  # num_free is filled when it is read
    plan: StepPlan
    moves: Moves
    submitted_s: float


class SimExecutor:
    """An executor in logical time. It knows no log-probabilities: requests that ask for
    them get none.

    Args:
      shape: static sizes, as for a device.
      truth: by submission index; may grow while the engine runs.
      cost: seconds of a step. link: of copying blocks to the host and back. disk: of
        writing them to disk and reading them.
      jump: let the engine skip planning where no decision is due. Answers, times and
        events are the same, in less time; only the order in which a launch lists its
        rows may differ. A callback hears of a whole jump at once: what it does on
        events other than the end of a request comes later than if each were planned.
    """

    compiles = 0
    block_bytes = 0

    def __init__(
        self,
        shape: EngineShape,
        truth: Mapping[int, Truth],
        cost: StepCost,
        *,
        link: LinkCost = INSTANT,
        disk: LinkCost = INSTANT,
        jump: bool = False,
    ):
        self.jumps = jump
        self._shape = shape
        self._truth = truth
        self._clock = LogicalClock(shape, cost, link, disk)
        self._sampled: dict[int, int] = {}  # tokens emitted so far, by submission index

    def now(self) -> float:
        """Logical seconds since the start."""
        return self._clock.now()

    def sleep_until(self, t_s: float) -> None:
        """Let logical time pass."""
        self._clock.sleep_until(t_s)

    def stored(self) -> Sequence[Label]:
        """Nothing: no disk outlives a simulation."""
        return ()

    def arrived(self) -> Arrived:
        """What has been fetched, loaded and saved since the last call."""
        return self._clock.arrived()

    def await_arrival(self, until_s: float) -> None:
        """Let logical time pass until the next order is done, or to until_s."""
        self._clock.await_arrival(until_s)

    def set_params(self, params: object) -> None:
        """Outputs are known, whatever the weights."""

    def release_pages(self) -> None:
        """There is no memory to free."""

    def restore_pages(self) -> None:
        """There is none to take."""

    def fingerprint(self) -> bytes:
        """There are no weights."""
        return b""

    def snapshot(self) -> tuple[LogicalClock, dict[int, int]]:
        """Its clock, and how much of each output has been told."""
        return self._clock, self._sampled

    def restore(
        self, saved: tuple[LogicalClock, dict[int, int]], time_s: float
    ) -> None:
        """Go on from there."""
        del time_s  # the clock's own
        self._clock, self._sampled = saved

    def interrupt(self) -> None:
        """Nobody waits in logical time."""

    def close(self, timeout_s: float = 10.0) -> bool:
        """Nothing is to be stopped."""
        del timeout_s
        return True

    def timed(self) -> list[Transferred]:
        """Transfers that have ended since the last call."""
        return self._clock.timed()

    def submit(
        self, plan: StepPlan, who: Sequence[int], moves: Moves = STILL
    ) -> _Ticket:
        """Look up what the launch samples; time passes when it is read."""
        self._clock.submit(moves)
        steps = self._shape.decode_steps
        columns = [[0] * steps] * plan.rows
        counts, done = [0] * plan.rows, [False] * plan.rows
        for row, (index, allowed) in enumerate(
            zip(who, plan.decode[:, 1].tolist(), strict=False)
        ):
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
            columns[row] = [*new, *[0] * (steps - len(new))]
            counts[row] = len(new)
            self._sampled[index] = end = start + len(new)
            done[row] = truth.stops and len(new) > 0 and end == len(truth.tokens)
        output = StepOutput(
            tokens=np.array(columns, np.int32).T,
            ran=np.arange(steps)[:, None] < np.array(counts),
            done=np.array(done),
            num_free=-1,
        )
        return _Ticket(output, plan, moves, self.now())

    def result(self, ticket: _Ticket) -> StepOutput:
        """Let the launch's time pass and count the free blocks after it."""
        output, plan, moves, submitted_s = ticket
        free = self._clock.finish(plan, output.ran, submitted_s, moves)
        return output._replace(num_free=free)

    def leap(
        self, rows: Sequence[tuple[int, int, bool]], launches: int, until_s: float
    ) -> Leap:
        """Run launches of the same decode rows; see `base.Simulation`."""
        steps = self._shape.decode_steps
        for _, index, runs in rows:
            if runs:
                left = len(self._truth[index].tokens) - self._sampled.get(index, 0)
                launches = min(launches, left // steps)
        slots = [(slot, runs) for slot, _, runs in rows]
        ends_s = self._clock.leap(slots, launches, until_s)
        tokens: list[list[int]] = []
        done: list[bool] = []
        for _, index, runs in rows:
            truth, start = self._truth[index], self._sampled.get(index, 0)
            end = start + len(ends_s) * steps * runs
            tokens.append(list(truth.tokens[start:end]))
            done.append(runs and truth.stops and end == len(truth.tokens))
            self._sampled[index] = end
        return Leap(tokens, done, ends_s)
