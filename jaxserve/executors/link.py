"""How long KV blocks take between device, host and disk on a simulated clock.

Owns the queues of the ways. Each direction carries one transfer after another (a
full-duplex bus, a disk with one writer and one reader). Never sees a payload or a
device.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence
from typing import Literal

from jaxserve.moves import Arrived, Moves, Transferred, Way


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
                    "carries nothing is num_swap_blocks=0, a disk num_disk_blocks=0"
                )


INSTANT = LinkCost()


class Links:
    """Transfers under way and done, in logical time.

    Args:
      link: of the way between device and host. disk: between host and disk.
    """

    def __init__(self, link: LinkCost, disk: LinkCost = INSTANT):
        self._cost: dict[Way, LinkCost] = {
            "out": link,
            "in": link,
            "save": disk,
            "load": disk,
        }
        self._free_s: dict[Way, float] = dict.fromkeys(self._cost, 0.0)
        self._here_s: dict[int, float] = {}  # when each payload is in host memory
        self._sent: list[tuple[float, Transferred]] = []  # when each one ends
        # When each order is done, as a heap: (time, order of asking, kind, name).
        self._coming: list[tuple[float, int, Literal["fetch", "done"], int]] = []
        self._asked = 0

    def submitted(self, moves: Moves, now_s: float) -> None:
        """A launch is submitted: what it fetches and loads leaves now."""
        if moves.load:
            names = [load.name for load in moves.load]
            end_s = self._send("load", names, now_s)
            self._here_s |= dict.fromkeys(names, end_s)
            self._tell(end_s, "done", names)
        for fetch in moves.fetch:
            # Until they are on the host they do not wait for others on this way.
            here_s = max(self._here_s[name] for name in fetch.names)
            at_s = max(now_s, here_s)
            end_s = self._send("in", fetch.names, at_s, fetch.number)
            self._tell(end_s, "fetch", [fetch.number])

    def started(self, moves: Moves, start_s: float) -> None:
        """A launch starts: what it spills leaves, and what it saves once it is here."""
        if moves.spill:
            names = [spill.name for spill in moves.spill]
            end_s = self._send("out", names, start_s)
            self._here_s |= dict.fromkeys(names, end_s)
        if moves.save:
            names = [save.name for save in moves.save]
            here_s = max(self._here_s[name] for name in names)
            end_s = self._send("save", names, max(start_s, here_s))
            self._tell(end_s, "done", names)
        for name in moves.drop:
            self._here_s.pop(name, None)

    def _send(
        self, way: Way, names: Sequence[int], at_s: float, fetch: int = -1
    ) -> float:
        """When a transfer ends that may leave at at_s."""
        start_s = max(at_s, self._free_s[way])
        cost = self._cost[way]
        seconds = cost.fixed_s + len(names) * cost.block_s
        self._free_s[way] = end_s = start_s + seconds
        sent = Transferred(way, tuple(names), seconds, start_s - at_s, fetch)
        self._sent.append((end_s, sent))
        return end_s

    def _tell(
        self, end_s: float, kind: Literal["fetch", "done"], names: Sequence[int]
    ) -> None:
        for name in names:
            self._asked += 1
            heapq.heappush(self._coming, (end_s, self._asked, kind, name))

    def timed(self, now_s: float) -> list[Transferred]:
        """Transfers that have ended since the last call."""
        ended = [sent for end_s, sent in self._sent if end_s <= now_s]
        self._sent = [entry for entry in self._sent if entry[0] > now_s]
        return ended

    def arrived(self, now_s: float) -> Arrived:
        """What has been done since the last call."""
        done: dict[str, list[int]] = {"fetch": [], "done": []}
        while self._coming and self._coming[0][0] <= now_s:
            _, _, kind, name = heapq.heappop(self._coming)
            done[kind].append(name)
        return Arrived(fetches=tuple(done["fetch"]), done=tuple(done["done"]))

    @property
    def next_arrival_s(self) -> float:
        """When the next order is done; infinity if none is under way."""
        return self._coming[0][0] if self._coming else math.inf
