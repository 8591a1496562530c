"""What an engine tells about itself: events in order, and totals.

Owns the queue of events and when they are delivered. Never sees a plan's contents.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.accounts import Accounts
from jaxserve.core import Event


class Reports:
    """Events not yet delivered, and the totals of the launches read.

    Args:
      on_event: called with every event; None drops them.
    """

    def __init__(self, on_event: Callable[[Event], None] | None):
        self._on_event = on_event
        self._events: deque[Event] = deque()
        self._delivering = False
        self._compiles = 0  # programs that launch events have reported
        self.accounts = Accounts()

    @property
    def wanted(self) -> bool:
        """Whether anybody listens to events."""
        return self._on_event is not None

    @property
    def delivered(self) -> bool:
        """Whether no event waits for `deliver`."""
        return not self._events

    def add(self, event: Event) -> None:
        """Queue an event."""
        if self.wanted:
            self._events.append(event)

    def add_launch(
        self, time_s: float, work: Mapping[str, Any], compiles: int = 0, **data: Any
    ) -> None:
        """Queue the event of a launch that was read.

        Args:
          work: what it did, in the event's terms.
          compiles: programs compiled so far; a simulation compiles none.
        """
        if self.wanted:
            new, self._compiles = compiles - self._compiles, compiles
            data = {**work, **data, "compiles": new}
            self._events.append(Event("launch", time_s, None, data))

    def restart(self, accounts: Accounts) -> None:
        """Go on from other totals; what is not delivered is forgotten."""
        self._events.clear()
        self.accounts = accounts

    def deliver(self) -> None:
        """Deliver events now that the engine is whole: a callback may call it."""
        if self._delivering or self._on_event is None:
            return
        self._delivering = True
        try:
            while self._events:
                self._on_event(self._events.popleft())
        finally:
            self._delivering = False
