"""What the engine asks of whatever runs its plans: a device or a simulation.

Owns the Executor protocol. Never sees the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from jaxserve.core import StepOutput, StepPlan
from jaxserve.moves import STILL, Arrived, Label, Moves, Transferred

Ticket = Any
"""A launch that was submitted and not yet read; redeemed once, in order."""


class Executor(Protocol):
    """Runs plans in the order of submission, on a clock of its own."""

    def submit(
        self, plan: StepPlan, who: Sequence[int], moves: Moves = STILL
    ) -> Ticket:
        """Start a launch and return at once.

        Args:
          who: submission index of each listed row's request.
          moves: blocks that cross between device, host and disk around it.
        """
        ...

    def stored(self) -> Sequence[Label]:
        """What is on disk from the start, the longest unused first."""
        ...

    def arrived(self) -> Arrived:
        """What has been fetched, loaded and saved since the last call."""
        ...

    def timed(self) -> Sequence[Transferred]:
        """Copies that have ended since the last call."""
        ...

    def await_arrival(self, until_s: float) -> None:
        """Return once `arrived` has more to tell, `now` is until_s, or interrupted.

        A fetch, load or save must be under way, or until_s finite.
        """
        ...

    def set_params(self, params: Any) -> None:
        """Other weights for every launch submitted from now on; none is under way.

        What is on disk was computed with the old ones, and is erased.
        """
        ...

    def release_pages(self) -> None:
        """Free the memory of all KV pages, in which no block is used."""
        ...

    def restore_pages(self) -> None:
        """Take that memory again, before the next launch."""
        ...

    def fingerprint(self) -> bytes:
        """What differs for other models and weights."""
        ...

    def snapshot(self) -> Any:
        """All that it holds but the weights, as a value that can be pickled. No launch
        is under way."""
        ...

    def restore(self, saved: Any, time_s: float) -> None:
        """Go on from a snapshot of an executor of the same shape, at a time on its
        clock."""
        ...

    def interrupt(self) -> None:
        """End the wait of `await_arrival` or `sleep_until` that is under way, or else
        the next one. The only method that any thread may call at any time.
        """
        ...

    def close(self, timeout_s: float = 10.0) -> bool:
        """Finish what is under way, and stop; nothing may be submitted any more.

        Returns False if that takes longer: what is left is lost.
        """
        ...

    def result(self, ticket: Ticket) -> StepOutput:
        """Wait for a launch; afterwards `now` is no earlier than its end."""
        ...

    def now(self) -> float:
        """Seconds since the executor was made."""
        ...

    def sleep_until(self, t_s: float) -> None:
        """Return once `now` is at least t_s, or interrupted."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes of a KV block; 0 where there are none."""
        ...

    @property
    def compiles(self) -> int:
        """Programs compiled so far."""
        ...


class Leap(NamedTuple):
    """Launches that were run without being planned one by one."""

    tokens: list[list[int]]  # output of each row
    done: list[bool]  # whether a row's last token is one of its stop ids
    ends_s: list[float]  # when each launch ended


class Simulation(Executor, Protocol):
    """An executor that knows how its launches will go, and may run many at once."""

    jumps: bool  # whether the engine shall ask for it

    def leap(
        self, rows: Sequence[tuple[int, int, bool]], launches: int, until_s: float
    ) -> Leap:
        """Run launches of the same decode rows, up to the end of the first of them.

        Args:
          rows: (slot, submission index, whether it runs all N steps or none) of each.
          launches: how many at most. until_s: none is planned at this time or later.
        """
        ...
