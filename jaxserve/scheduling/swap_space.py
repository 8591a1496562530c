"""What waits below the device: preempted requests whose KV was swapped out.

Owns which payload or file holds which of their columns. Counts and names only: it never
sees a payload, a plan's arrays or a clock.

A request's private columns are copied when it is preempted. Its named ones stay on the
device, findable and evictable. To the host each is copied when it is evicted: room is
set aside for all of them. To disk they are written at once, as far as they are not
there, for a write may fail and an eviction cannot wait for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from jaxserve.moves import Label
from jaxserve.scheduling.plan_builder import PlanBuilder
from jaxserve.scheduling.running import Running
from jaxserve.scheduling.tiers import Place, Tiers

To = Literal["swap", "disk"]


@dataclasses.dataclass
class Swapped:
    """A request that waits with its KV below the device.

    Attributes:
      stay: the stay that ended; what it computed is final once its launches are read.
      to: where its private columns went.
      private: payload of each of them; on disk, that of its file.
      keys: of its leading columns, which had names then; pinned in the tiers.
      promised: blocks of the pool set aside for those.
    """

    stay: Running
    to: To
    private: dict[int, int]
    keys: list[bytes]
    promised: int = 0


class SwapSpace:
    """The swapped requests.

    Attributes:
      tiers: hold what they wait with.
      waiting: swapped requests by submission index.
      lost: how many had to be computed again after all.
    """

    def __init__(self, tiers: Tiers):
        self.tiers = tiers
        self._wanted: dict[bytes, set[int]] = {}  # by key, who would restore it
        self.waiting: dict[int, Swapped] = {}
        self.lost = 0

    def holds_nothing(self) -> bool:
        """Whether no map has an entry left."""
        return not (self.waiting or self._wanted or self.tiers.payloads.promised)

    @property
    def used(self) -> int:
        """Blocks below the device that only swapped requests keep there."""
        return sum(len(entry.private) for entry in self.waiting.values())

    def take(
        self, plan: PlanBuilder, stay: Running, columns: range, promised: int
    ) -> None:
        """Keep a request that is being preempted on the host; there must be room.

        Args:
          columns: its private ones, copied by this plan.
          promised: its named columns that nobody else uses, all of which may have to
            be copied later.
        """
        index, payloads = stay.request.index, self.tiers.payloads
        self.tiers.make_room(plan, len(columns) + promised)
        private = {}
        for column in columns:
            private[column] = name = payloads.new("pool", request=index)
            plan.spill_column(name, stay.slot, column)
        payloads.promised += promised
        keys = stay.keys[: columns.start]
        self._wait(Swapped(stay, "swap", private, keys, promised))

    def take_to_disk(
        self,
        plan: PlanBuilder,
        stay: Running,
        columns: range,
        named: Sequence[tuple[int, Label]],
    ) -> None:
        """Keep a request that is being preempted on disk; there must be room.

        Args:
          columns: its private ones.
          named: handle and label of its named ones that nobody else uses.
        """
        index = stay.request.index
        entry = Swapped(stay, "disk", {}, stay.keys[: columns.start])
        self._wait(entry)  # pins what it needs, before room is made
        for handle, label in named:
            self.tiers.keep(plan, handle, label, request=index, to_disk=True)
        for column in columns:
            name = self.tiers.swap_column(plan, stay.slot, column, request=index)
            entry.private[column] = name

    def _wait(self, entry: Swapped) -> None:
        index = entry.stay.request.index
        self.waiting[index] = entry
        self.tiers.pin(entry.keys)
        for key in entry.keys:
            self._wanted.setdefault(key, set()).add(index)

    def evicted(self, plan: PlanBuilder, handle: int, label: Label | None) -> None:
        """A block leaves the device in this plan: copy it if it is wanted, or cached.

        Where there is no room for it, those who want it will compute again.

        Args:
          label: None if its key is forgotten.
        """
        if label is None:
            return
        key = label.key
        wanted = self._wanted.get(key)
        if not wanted:
            self.tiers.evicted(plan, handle, label)
            return
        promised = [i for i in wanted if self.waiting[i].promised]
        on_host = self.tiers.host.payload(key) is not None
        if on_host or (key in self.tiers.disk and not promised):
            return
        if promised:
            self.waiting[min(promised)].promised -= 1
        owner = min(promised or wanted)
        kept = self.tiers.keep(
            plan, handle, label, request=owner, promised=bool(promised)
        )
        if not kept:
            self.lost += len(wanted)
            for index in sorted(wanted):
                self.drop(index)
            self.tiers.left(key)

    def sources(self, index: int, columns: range) -> list[Place] | None | Literal[True]:
        """Where a request's columns are: None if one is lost, True if one is still on
        its way down."""
        entry, tiers = self.waiting[index], self.tiers
        places: list[Place] = []
        coming = False
        for column in columns:
            name = entry.private.get(column)
            if name is not None and entry.to == "swap":
                places.append(Place("host", name))
            elif name is not None:
                there = tiers.swapped(name)
                if there == "lost":
                    return None
                if isinstance(there, Place):
                    places.append(there)
                else:
                    coming = True
            elif column >= len(entry.keys):
                return None
            elif place := tiers.place(entry.keys[column]):
                places.append(place)
            elif tiers.is_coming(entry.keys[column]):
                coming = True
            else:
                return None
        return coming or places

    def drop(self, index: int) -> None:
        """Let go of what is kept for a request, if anything is."""
        entry = self.waiting.pop(index, None)
        if entry is None:
            return
        payloads = self.tiers.payloads
        payloads.promised -= entry.promised
        for name in entry.private.values():
            if entry.to == "swap":
                payloads.let_go(name, "pool")
            else:
                self.tiers.forget_swapped(name)
        for key in entry.keys:
            self._wanted[key].discard(index)
            if not self._wanted[key]:
                del self._wanted[key]
        self.tiers.unpin(entry.keys)
