"""What waits on the host: preempted requests whose KV was swapped out.

Owns the count of host blocks, and which payload holds which column or key. Counts and
names only: it never sees a payload, a plan's arrays or a clock.

A request's private columns are copied when it is preempted. Its named ones stay on the
device, findable and evictable; room on the host is set aside for them, and each is
copied when it is evicted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from jaxserve.scheduling.plan_builder import PlanBuilder
from jaxserve.scheduling.running import Running


@dataclasses.dataclass
class Swapped:
    """A request that waits with its KV on the host.

    Attributes:
      stay: the stay that ended; what it computed is final once its launches are read.
      payloads: name of each column that was copied when it ended.
      keys: of its leading columns, which had names then.
      promised: host blocks set aside for those.
      fetching: payloads asked for, in column order.
    """

    stay: Running
    payloads: dict[int, int]
    keys: list[bytes]
    promised: int
    fetching: tuple[int, ...] = ()


class SwapSpace:
    """Host memory for `blocks` blocks.

    Attributes:
      waiting: swapped requests by submission index.
      lost: how many had to be computed again after all.
    """

    def __init__(self, blocks: int):
        self._blocks = blocks
        self._next_name = 0
        self._stored = 0  # payloads held, or being copied
        self._promised = 0  # blocks set aside for columns still on the device
        self._copies: dict[bytes, int] = {}  # payload of an evicted block
        self._wanted: dict[bytes, set[int]] = {}  # by key, who would restore it
        self._dropped: list[int] = []  # payloads that no plan has dropped yet
        self._unread: set[int] = set()  # payloads of launches not read yet
        self._arrived: set[int] = set()  # payloads fetched
        self._copied: list[tuple[int, int]] = []  # for whom, which payload
        self.waiting: dict[int, Swapped] = {}
        self.lost = 0

    @property
    def free(self) -> int:
        """Host blocks that nobody has or was promised."""
        return self._blocks - self._stored - self._promised

    @property
    def used(self) -> int:
        """Host blocks that hold a payload."""
        return self._stored

    @property
    def has_dropped(self) -> bool:
        """Whether a plan should let go of payloads."""
        return bool(self._dropped)

    @property
    def fetching(self) -> bool:
        """Whether a payload that was asked for has not arrived."""
        return any(
            not self._arrived.issuperset(entry.fetching)
            for entry in self.waiting.values()
        )

    def holds_nothing(self) -> bool:
        """Whether no map has an entry left."""
        maps = self.waiting or self._copies or self._wanted or self._dropped
        return not (maps or self._stored or self._promised or self._arrived)

    # Out ------------------------------------------------------------------------------

    def take(
        self, plan: PlanBuilder, stay: Running, columns: range, promised: int
    ) -> None:
        """Keep a request that is being preempted; there must be room.

        Args:
          columns: its private ones, copied by this plan.
          promised: its named columns that nobody else uses, all of which may have to
            be copied later.
        """
        index = stay.request.index
        payloads = {column: self._store(index) for column in columns}
        for column, name in payloads.items():
            plan.spill_column(name, stay.slot, column)
        keys = stay.keys[: columns.start]
        self.waiting[index] = Swapped(stay, payloads, keys, promised)
        self._promised += promised
        for key in keys:
            self._wanted.setdefault(key, set()).add(index)

    def evict(self, plan: PlanBuilder, handle: int, key: bytes | None) -> None:
        """The block of a key leaves the device in this plan: copy it if it is wanted.

        Where there is no room for it, those who want it will compute again.
        """
        wanted = self._wanted.get(key) if key is not None else None
        if not wanted or key in self._copies:
            return
        assert key is not None
        promised = [i for i in wanted if self.waiting[i].promised]
        if promised:
            self.waiting[min(promised)].promised -= 1
            self._promised -= 1
        elif self.free <= 0:
            self.lost += len(wanted)
            for index in sorted(wanted):
                self.drop(index)
            return
        self._copies[key] = self._store(min(promised or wanted))
        plan.spill_handle(self._copies[key], handle)

    def _store(self, index: int) -> int:
        self._stored += 1
        name, self._next_name = self._next_name, self._next_name + 1
        self._unread.add(name)
        self._copied.append((index, name))
        return name

    def take_copied(self) -> list[tuple[int, int]]:
        """Payloads copied since the last call: (for which request, name)."""
        copied, self._copied = self._copied, []
        return copied

    def read(self, names: Iterable[int]) -> None:
        """The launch that copied these payloads has been read."""
        self._unread.difference_update(names)

    # Back -----------------------------------------------------------------------------

    def payloads(self, index: int, columns: range) -> list[int] | None:
        """Names of the payloads of a request's columns; None if one is lost."""
        entry, names = self.waiting[index], []
        for column in columns:
            name = entry.payloads.get(column)
            if name is None and column < len(entry.keys):
                name = self._copies.get(entry.keys[column])
            if name is None:
                return None
            names.append(name)
        return names

    def has_arrived(self, names: Sequence[int]) -> bool:
        """Whether all of the payloads can be restored."""
        return self._arrived.issuperset(names)

    def fetches(self, index: int, names: Sequence[int]) -> bool:
        """Whether these payloads are on their way, or may not be asked for yet."""
        asked = self.waiting[index].fetching == tuple(names)
        return asked or not self._unread.isdisjoint(names)

    def fetch(self, plan: PlanBuilder, index: int, names: Sequence[int]) -> None:
        """Ask for payloads."""
        self.waiting[index].fetching = tuple(names)
        plan.fetch += [name for name in names if name not in self._arrived]

    def arrive(self, names: Iterable[int]) -> None:
        """Payloads that were asked for can be restored; dropped ones do not count."""
        wanted = {n for entry in self.waiting.values() for n in entry.fetching}
        self._arrived |= wanted.intersection(names)

    def drop(self, index: int) -> None:
        """Let go of what is kept for a request, if anything is."""
        entry = self.waiting.pop(index, None)
        if entry is None:
            return
        self._promised -= entry.promised
        gone = list(entry.payloads.values())
        for key in entry.keys:
            self._wanted[key].discard(index)
            if not self._wanted[key]:
                del self._wanted[key]
                if key in self._copies:
                    gone.append(self._copies.pop(key))
        self._stored -= len(gone)
        self._dropped += gone
        self._unread.difference_update(gone)
        self._arrived.difference_update(gone)

    def flush(self, plan: PlanBuilder) -> None:
        """Drop in this plan what was let go of."""
        plan.drop += self._dropped
        self._dropped.clear()
