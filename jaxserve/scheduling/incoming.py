"""KV blocks on their way to the device for requests that wait.

Owns who has asked for what, and what of it has come. Never sees a payload's contents;
the time is an argument.

What is on disk is first loaded into host memory, then all is fetched together; neither
takes a slot or a KV block of the device. Whoever has waited too long gives up, and is
computed instead.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jaxserve.moves import Arrived, Fetch
from jaxserve.scheduling.plan_builder import PlanBuilder
from jaxserve.scheduling.tiers import Place, Tiers


@dataclasses.dataclass
class Coming:
    """What one request has asked for.

    Attributes:
      first: column of the first place.
      places: where each column was when it was asked for; none while it is on its way
        down.
      pinned: keys to be kept in the tiers until all are fetched.
      until_s: when to give up.
      swapped: it is what a swapped request gets back; else they are cached blocks.
      left: how many leading places are not fetched yet.
      names: payload of each of those, once those on disk are being loaded.
      fetches: those ordered, in column order; each brings the columns behind the one
        before.
      coming: number of the one that is under way.
      given_up: whether nothing of it is to come any more.
    """

    first: int
    places: list[Place]
    pinned: list[bytes]
    until_s: float
    swapped: bool
    left: int
    names: list[int] = dataclasses.field(default_factory=list)
    fetches: list[Fetch] = dataclasses.field(default_factory=list)
    coming: int | None = None
    given_up: bool = False

    @property
    def end(self) -> int:
        """The column after the last."""
        return self.first + len(self.places)

    @property
    def arrived(self) -> bool:
        """Whether it can be restored."""
        under_way = self.left or self.coming is not None
        return bool(self.places) and not (under_way or self.given_up)

    @property
    def waits(self) -> bool:
        """Whether it has neither come nor been given up."""
        return not (self.arrived or self.given_up)

    def from_disk(self, start: int) -> int:
        """How many columns from `start` on were on disk."""
        places = self.places[start - self.first :]
        return sum(place.tier == "disk" for place in places)


class Incoming:
    """All that waiting requests have asked for.

    Args:
      timeout_s: how long a request waits for what it asked for.
    """

    def __init__(self, tiers: Tiers, timeout_s: float):
        self._tiers = tiers
        self._timeout_s = timeout_s
        self._coming: dict[int, Coming] = {}  # by submission index
        self._fetching: dict[int, int] = {}  # by number, whose fetch is under way
        self._cancelled: list[int] = []
        self._next_number = 0
        self.timeouts = 0

    @property
    def next_timeout_s(self) -> float:
        """When somebody gives up; infinity if nobody waits."""
        waits = [c.until_s for c in self._coming.values() if c.waits]
        return min(waits, default=math.inf)

    @property
    def has_cancelled(self) -> bool:
        """Whether a plan should call a fetch off."""
        return bool(self._cancelled)

    def holds_nothing(self) -> bool:
        """Whether no map has an entry left."""
        return not (self._coming or self._fetching or self._cancelled)

    def owner(self, number: int) -> int | None:
        """Whose fetch is under way by this number."""
        return self._fetching.get(number)

    def get(self, index: int) -> Coming | None:
        """What a request has asked for, if anything."""
        return self._coming.get(index)

    def ask(
        self,
        plan: PlanBuilder,
        index: int,
        first: int,
        places: Sequence[Place],
        pinned: Sequence[bytes],
        now_s: float,
        *,
        swapped: bool,
    ) -> bool:
        """A waiting request wants the columns from `first` on.

        Returns False if it must do without, since too much is being loaded already.

        Args:
          swapped: it is a swapped request, which waits its turn to load as long as it
            would for the load.
        """
        until_s, left = now_s + self._timeout_s, len(places)
        coming = Coming(first, list(places), list(pinned), until_s, swapped, left)
        self._coming[index] = coming
        self._tiers.pin(coming.pinned)
        self._go_on(plan, index, coming)
        if not coming.names and coming.left and not swapped:
            self._give_up(coming)
        return coming.waits

    def extend(
        self,
        plan: PlanBuilder,
        index: int,
        places: Sequence[Place],
        pinned: Sequence[bytes],
        now_s: float,
    ) -> None:
        """A request for which all has come wants the columns before it too."""
        coming = self._coming[index]
        coming.first -= len(places)
        coming.places[:0] = places
        coming.left, coming.names = len(places), []
        coming.pinned = list(pinned)
        coming.until_s = now_s + self._timeout_s
        self._tiers.pin(coming.pinned)
        self._go_on(plan, index, coming)

    def hold(self, index: int, now_s: float) -> None:
        """A swapped request waits until all of it is where it can be loaded from."""
        if index not in self._coming:
            self._coming[index] = Coming(0, [], [], now_s + self._timeout_s, True, 0)

    def advance(self, plan: PlanBuilder, now_s: float) -> None:
        """Load and fetch what can be now, and give up what does not come."""
        for index, coming in self._coming.items():
            if coming.waits and now_s >= coming.until_s:
                self.timeouts += 1
                self._give_up(coming)
            elif coming.left and not coming.given_up:
                self._go_on(plan, index, coming)

    def _go_on(self, plan: PlanBuilder, index: int, coming: Coming) -> None:
        tiers, places = self._tiers, coming.places[: coming.left]
        there = (
            [tiers.payloads.holds(name) for name in coming.names]
            if coming.names
            else [tiers.has(place) for place in places]
        )
        if not all(there):
            self._cut(coming, there.index(False))
            places = coming.places[: coming.left]
        if coming.given_up:
            return
        if not coming.names:
            # All at once or nothing, or two could wait for what the other one holds.
            if not tiers.can_load(sum(place.tier == "disk" for place in places)):
                return
            coming.names = [
                place.payload
                if place.tier == "host"
                else tiers.load(plan, place.label, request=index)
                for place in places
            ]
        if all(map(tiers.payloads.is_here, coming.names)):
            number, self._next_number = self._next_number, self._next_number + 1
            fetch = Fetch(number, coming.first, tuple(coming.names))
            plan.fetch.append(fetch)
            coming.fetches.insert(0, fetch)
            coming.coming = number
            self._fetching[number] = index
            self._let_go(coming)

    def _let_go(self, coming: Coming, start: int = 0) -> None:
        """Payloads from place `start` on are copied already, or are not needed."""
        places = coming.places[start : coming.left]
        for name, place in zip(coming.names[start:], places, strict=False):
            if place.tier == "disk":
                self._tiers.unload(name)
        if not start:
            self._tiers.unpin(coming.pinned)
            coming.pinned, coming.names, coming.left = [], [], 0

    def _give_up(self, coming: Coming) -> None:
        self._let_go(coming)
        self._call_off(coming)
        coming.given_up = True

    def _call_off(self, coming: Coming) -> None:
        if coming.coming is not None:
            del self._fetching[coming.coming]
            coming.coming = None
        self._cancelled += [fetch.number for fetch in coming.fetches]
        coming.fetches = []

    def arrived(self, arrived: Arrived) -> None:
        """Take in what has been fetched, and what cannot be."""
        for number in arrived.fetches:
            index = self._fetching.pop(number, None)
            if index is not None:  # else it was called off
                self._coming[index].coming = None
        if arrived.failed:
            holds = self._tiers.payloads.holds  # a payload that was not saved is here
            for coming in self._coming.values():
                there = [holds(name) for name in coming.names]
                if not all(there):
                    self._cut(coming, there.index(False))

    def _cut(self, coming: Coming, keep: int) -> None:
        """Some columns will not come: do with those before them."""
        if not keep:
            self._give_up(coming)
            return
        self._let_go(coming, keep)
        self._call_off(coming)  # what is behind them
        del coming.names[keep:], coming.places[keep:]
        coming.left = keep

    def drop(self, index: int, restored: Sequence[Fetch] = ()) -> None:
        """Forget what a request asked for, if anything.

        Args:
          restored: what this plan gives to it.
        """
        coming = self._coming.pop(index, None)
        if coming is not None:
            coming.fetches = [f for f in coming.fetches if f not in restored]
            self._give_up(coming)

    def flush(self, plan: PlanBuilder) -> None:
        """Call off in this plan what is not needed."""
        plan.cancel += self._cancelled
        self._cancelled.clear()
