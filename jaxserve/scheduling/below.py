"""What a waiting request gets from below the device, and asking for it.

Owns the way back of swapped requests and of cached blocks, which is one: find where the
columns are, have them brought up, restore them. Never decides who is admitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.core import Request
from jaxserve.moves import NO_KEY
from jaxserve.scheduling.incoming import Coming, Incoming
from jaxserve.scheduling.plan_builder import PlanBuilder
from jaxserve.scheduling.residents import Residents, Restored
from jaxserve.scheduling.swap_space import SwapSpace
from jaxserve.scheduling.tiers import Place


class Below(NamedTuple):
    """What a waiting request can get from below the device.

    Attributes:
      restored: what has come for it.
      places: what it should ask for.
      waits: whether something is on its way.
    """

    restored: Restored | None = None
    places: Sequence[Place] = ()
    waits: bool = False


WAITS = Below(waits=True)


class FromBelow:
    """The way back, in one plan.

    Args:
      size: B.
    """

    def __init__(
        self,
        residents: Residents,
        swaps: SwapSpace,
        incoming: Incoming,
        plan: PlanBuilder,
        now_s: float,
        size: int,
    ):
        self._residents = residents
        self._swaps = swaps
        self._incoming = incoming
        self._plan = plan
        self._now_s = now_s
        self._size = size

    def cached(
        self, request: Request, keys: list[bytes], hits: int, usable: int
    ) -> Below:
        """Cached blocks behind those that a request finds on the device.

        Args:
          keys: of its tokens. hits: columns on the device. usable: it could adopt.
        """
        index, coming = request.index, self._incoming.get(request.index)
        find = self._swaps.tiers.find
        if coming and coming.swapped:
            self._incoming.drop(index)  # of a swap that was lost
            coming = None
        if coming is None:
            return Below(places=find(keys[hits:usable]))
        if coming.waits:
            return WAITS
        if coming.given_up or coming.end <= hits:
            if coming.arrived:
                self._incoming.drop(index)  # others brought it
            return Below()
        if hits < coming.first:  # what was cached then has left the device
            places = find(keys[hits : coming.first])
            if len(places) < coming.first - hits:
                self._incoming.drop(index)
                return Below(places=places)
            self._extend(request, keys, hits, places)
            return WAITS
        rows = coming.end * self._size
        return Below(_restored(coming, rows, request.num_tokens, hits))

    def swapped(self, request: Request, hits: int) -> Below | None:
        """The columns of a swapped request behind those that it finds on the device.

        None: something of it is lost, or others have computed more of its prompt
        meanwhile than it had.
        """
        index, coming = request.index, self._incoming.get(request.index)
        stay = self._swaps.waiting[index].stay
        rows = stay.known_rows
        end = -(-rows // self._size)
        # It goes on to decode, or with what its prompt still lacks.
        context = rows if stay.prefilled else request.num_tokens
        if hits * self._size > rows:
            return None
        if hits == end:
            self._incoming.drop(index)
            return Below(Restored((), rows, context, 0, resumed=True))
        if coming and coming.given_up:
            self._swaps.lost += 1
            return None
        if coming and coming.waits and coming.places:
            return WAITS
        arrived = coming if coming and coming.arrived and coming.end == end else None
        if arrived and arrived.first <= hits:
            return Below(_restored(arrived, rows, context, hits))
        # What was cached on the device has left it since.
        missing = range(hits, arrived.first if arrived else end)
        places = self._swaps.sources(index, missing)
        if places is None:
            self._swaps.lost += 1
            return None
        if places is True:
            if coming and coming.places:
                self._incoming.drop(index)
            self._incoming.hold(index, self._now_s)
            return WAITS
        if arrived:
            self._extend(request, stay.keys, hits, places)
            return WAITS
        self._incoming.drop(index)
        return Below(places=places)

    def ask(
        self, request: Request, keys: list[bytes], hits: int, places: Sequence[Place]
    ) -> bool:
        """Whether a request's columns from `hits` on are on their way now."""
        swapped = self._swaps.waiting.get(request.index)
        if swapped:  # what it needs is kept for it already, and waits its turn
            keys, pinned = swapped.stay.keys, []
        else:
            pinned = keys[: hits + len(places)]
        return self._incoming.ask(
            self._plan,
            request.index,
            hits,
            self._labelled(request, keys, hits, places),
            pinned,
            self._now_s,
            swapped=swapped is not None,
        )

    def _extend(
        self, request: Request, keys: list[bytes], hits: int, places: Sequence[Place]
    ) -> None:
        """Ask for columns before those that have come."""
        swapped = request.index in self._swaps.waiting
        self._incoming.extend(
            self._plan,
            request.index,
            self._labelled(request, keys, hits, places),
            [] if swapped else keys[: hits + len(places)],
            self._now_s,
        )

    def _labelled(
        self, request: Request, keys: list[bytes], hits: int, places: Sequence[Place]
    ) -> list[Place]:
        """The places with what a file must say to be this request's: the name of one
        that was there from the start does not tell its salt or weights."""
        return [
            place._replace(label=self._residents.label(request, keys, column))
            if place.tier == "disk" and place.label.parent != NO_KEY
            else place
            for column, place in enumerate(places, hits)
        ]


def _restored(coming: Coming, rows: int, context: int, hits: int) -> Restored:
    fetches = tuple(fetch for fetch in coming.fetches if fetch.end > hits)
    disk = coming.from_disk(hits)
    return Restored(fetches, rows, context, disk, resumed=coming.swapped)
