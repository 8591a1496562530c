"""What the engine asks of whatever runs its plans: a device or a simulation.

Owns the Executor protocol. Never sees the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from jaxserve.core import StepOutput, StepPlan

Ticket = Any
"""A launch that was submitted and not yet read; redeemed once, in order."""


class Executor(Protocol):
    """Runs plans in the order of submission, on a clock of its own."""

    def submit(self, plan: StepPlan, who: Sequence[int]) -> Ticket:
        """Start a launch and return at once; `who` holds the submission
        index of each listed row's request."""
        ...

    def result(self, ticket: Ticket) -> StepOutput:
        """Wait for a launch; afterwards `now` is no earlier than its end."""
        ...

    def now(self) -> float:
        """Seconds since the executor was made."""
        ...

    def sleep_until(self, t_s: float) -> None:
        """Return once `now` is at least t_s."""
        ...

    @property
    def compiles(self) -> int:
        """Programs compiled so far."""
        ...
