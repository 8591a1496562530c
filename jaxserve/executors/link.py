"""How long KV blocks take between device and host on a simulated clock.

Owns the link's queues. Each direction carries one transfer after another (a full-duplex
bus). Never sees a payload or a device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from jaxserve.moves import Transferred


@dataclasses.dataclass(frozen=True)
class LinkCost:
    """Seconds of a transfer: fixed_s, and block_s for each KV block.

    Attributes:
      block_s: bytes of a block / bytes a second.
      fixed_s: of any transfer.
    """

    block_s: float = 0.0
    fixed_s: float = 0.0

    def __post_init__(self) -> None:
        for field in ("block_s", "fixed_s"):
            value = getattr(self, field)
            if not 0 <= value < math.inf:
                raise ValueError(
                    f"{field}={value!r} must be a number of seconds >= 0; a link that "
                    "carries nothing is num_swap_blocks=0"
                )


INSTANT = LinkCost()


class Link:
    """Transfers under way and done, in logical time."""

    def __init__(self, cost: LinkCost):
        self._cost = cost
        self._out_free_s = 0.0  # when the way to the host is free
        self._in_free_s = 0.0
        self._stored_s: dict[int, float] = {}  # when each payload is on the host
        self._sent: list[tuple[float, Transferred]] = []  # when each one ends
        self._arrive_s: dict[int, float] = {}  # when each one fetched will be there

    def spill(self, names: Sequence[int], start_s: float) -> None:
        """Payloads leave for the host together."""
        if not names:
            return
        self._out_free_s = self._send("out", names, start_s, self._out_free_s)
        self._stored_s |= dict.fromkeys(names, self._out_free_s)

    def fetch(self, names: Sequence[int], start_s: float) -> None:
        """Payloads leave for the device together, once all are on the host."""
        if not names:
            return
        stored_s = max(self._stored_s[name] for name in names)
        # Until they are on the host they do not wait for others on this way.
        start_s = max(start_s, stored_s)
        self._in_free_s = self._send("in", names, start_s, self._in_free_s)
        self._arrive_s |= dict.fromkeys(names, self._in_free_s)

    def _send(
        self,
        way: Literal["out", "in"],
        names: Sequence[int],
        at_s: float,
        free_s: float,
    ) -> float:
        """When a transfer ends that is asked for at at_s on a way free from free_s."""
        start_s = max(at_s, free_s)
        seconds = self._cost.fixed_s + len(names) * self._cost.block_s
        self._sent.append(
            (start_s + seconds, Transferred(way, tuple(names), seconds, start_s - at_s))
        )
        return start_s + seconds

    def timed(self, now_s: float) -> list[Transferred]:
        """Transfers that have ended since the last call."""
        ended = [sent for end_s, sent in self._sent if end_s <= now_s]
        self._sent = [entry for entry in self._sent if entry[0] > now_s]
        return ended

    def drop(self, names: Sequence[int]) -> None:
        """Payloads are not needed any more."""
        for name in names:
            self._stored_s.pop(name, None)
            self._arrive_s.pop(name, None)

    def arrivals(self, now_s: float) -> list[int]:
        """Payloads that have arrived since the last call."""
        there = [name for name, at_s in self._arrive_s.items() if at_s <= now_s]
        for name in there:
            del self._arrive_s[name]
        return there

    @property
    def next_arrival_s(self) -> float:
        """When the next payload arrives; infinity if none is on its way."""
        return min(self._arrive_s.values(), default=math.inf)
