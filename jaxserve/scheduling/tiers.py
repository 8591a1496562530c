"""Cached blocks below the device: in host memory and on disk, by the same keys.

Owns which keys are where, what is written and what leaves. Names and counts only: it
never sees a payload's contents, a file or a clock.

Whatever there is no room for is a miss: nobody waits for room in a tier. A block whose
parent is in no tier any more cannot be found, and leaves too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from jaxserve.moves import NO_KEY, Arrived, Erase, Label, Load, Save
from jaxserve.scheduling.payloads import Payloads
from jaxserve.scheduling.plan_builder import PlanBuilder
from jaxserve.scheduling.tier_index import Eviction, TierIndex

Write = Literal["never", "on_eviction", "through"]


class Place(NamedTuple):
    """Where the contents of a block are, below the device."""

    tier: Literal["host", "disk"]
    payload: int = -1  # on the host
    label: Label = Label(NO_KEY, NO_KEY)  # on disk


@dataclasses.dataclass
class TierCounters:
    """Totals since the tiers were made, in blocks."""

    saved_blocks: int = 0  # written to disk
    loaded_blocks: int = 0  # read from disk
    failed_saves: int = 0
    failed_loads: int = 0  # files missing, damaged or not ours, errors
    skipped_saves: int = 0  # not tried, for the window was full
    unreachable_blocks: int = 0  # left since the block before them was gone


def _alike(column: int) -> float:
    return 1.0


def _nowhere(key: bytes) -> bool:
    return False


class Tiers:
    """Cached blocks on the host and on disk.

    Args:
      payloads: host memory.
      disk_blocks: room on disk; 0 = there is none.
      write: when a block is copied down: never, when it is evicted from the tier
        above, or as soon as it has a name.
      eviction: which block leaves a full tier.
      compute_s: seconds to compute the block of a column, its prefix being there.
      on_device: whether a key is cached on the device.
      stored: what is on disk from the start, the longest unused first.
    """

    def __init__(
        self,
        payloads: Payloads,
        disk_blocks: int = 0,
        *,
        write: Write = "on_eviction",
        eviction: Eviction = "lru",
        compute_s: Callable[[int], float] = _alike,
        on_device: Callable[[bytes], bool] = _nowhere,
        stored: Iterable[Label] = (),
    ):
        self.payloads = payloads
        self.host = TierIndex(eviction, compute_s)
        self.disk = TierIndex(eviction, compute_s)
        self.counters = TierCounters()
        self._write: Write = write
        self._disk_blocks = disk_blocks
        self._on_device = on_device
        self._saving: dict[int, Label] = {}  # payloads on their way to disk
        self._loading: dict[int, Label] = {}  # and from it
        self._abandoned: set[int] = set()  # of these, not wanted any more
        self._unready: set[bytes] = set()  # keys on disk whose file is not there yet
        self._private: dict[int, bool] = {}  # files of swapped requests: whether there
        self._erased: list[Erase] = []  # what no plan has erased yet
        self._saves = 0  # of the plan that is being built
        self._named: list[tuple[int, Label]] = []  # named since the last plan
        self._to_save: list[tuple[int, Label]] = []  # by `save_all`
        for label in stored:
            if disk_blocks:
                self.disk.add(label)
                self._trim_disk()

    # State ----------------------------------------------------------------------------

    @property
    def has_disk(self) -> bool:
        """Whether blocks may be written to disk."""
        return self._disk_blocks > 0

    @property
    def disk_used(self) -> int:
        """Blocks on disk, or on their way there."""
        return len(self.disk) + len(self._private)

    @property
    def under_way(self) -> int:
        """Blocks on their way to disk or from it."""
        return len(self._saving) + len(self._loading)

    @property
    def has_chores(self) -> bool:
        """Whether a plan should write, erase or drop something."""
        ready = self._to_save and self.payloads.free("window") > 0
        return bool(ready or self._named or self._erased or self.payloads.has_dropped)

    def room_in_pool(self) -> int:
        """Blocks of the pool that are free or cached for nobody."""
        return self.payloads.free("pool") + self.host.evictable

    def room_on_disk(self) -> int:
        """Blocks that could be written to disk now."""
        disk = self._disk_blocks - self.disk_used + self.disk.evictable
        return min(disk, self.payloads.free("window"))

    def place(self, key: bytes) -> Place | None:
        """Where a block can be had from, the nearest first."""
        payload = self.host.payload(key)
        if payload is not None:
            return Place("host", payload)
        if key in self.disk and key not in self._unready:
            return Place("disk", label=self.disk.label(key))
        return None

    def has(self, place: Place) -> bool:
        """Whether the contents are still where they were."""
        if place.tier == "host":
            return self.payloads.holds(place.payload)
        label = place.label
        if label.parent == NO_KEY:
            return self._private.get(int.from_bytes(label.key, "little"), False)
        return label.key in self.disk and label.key not in self._unready

    def find(self, keys: Sequence[bytes]) -> list[Place]:
        """Places of the longest prefix of `keys` that has one for each."""
        places = []
        for key in keys:
            place = self.place(key)
            if place is None:
                break
            places.append(place)
        return places

    def holds(self, key: bytes) -> bool:
        """Whether a block is below the device, or on its way down."""
        return key in self.host or key in self.disk

    def is_coming(self, key: bytes) -> bool:
        """Whether a block is on its way to disk, and will be there."""
        return key in self._unready

    def use(self, keys: Sequence[bytes]) -> None:
        """Blocks of a chain were found, first block first."""
        self.host.use(keys)
        self.disk.use(keys)

    def pin(self, keys: Sequence[bytes]) -> None:
        """Keep the blocks of a chain, wherever they are or come to."""
        self.host.pin(keys)
        self.disk.pin(keys)

    def unpin(self, keys: Sequence[bytes]) -> None:
        """Let go of a chain that was pinned."""
        self.host.unpin(keys)
        self.disk.unpin(keys)

    # Down -----------------------------------------------------------------------------

    def named(self, handle: int, label: Label) -> None:
        """A block got a name on the device."""
        if self._write == "through" and (self.has_disk or self.payloads.size("pool")):
            self._named.append((handle, label))

    def write_through(
        self, plan: PlanBuilder, handle_of: Callable[[bytes], int | None]
    ) -> None:
        """Copy down what was named by the plans before."""
        named, self._named = self._named, []
        for handle, label in named:
            if handle_of(label.key) == handle:  # else it was evicted, or forgotten
                self.keep(plan, handle, label)
        while self._to_save and self.payloads.free("window") > 0:
            handle, label = self._to_save.pop(0)
            if label.key in self.disk:
                continue
            name = self.host.payload(label.key)
            if name is not None and self._room_for_save(name):
                self._save(plan, name, label)
            elif handle_of(label.key) == handle:
                self.keep(plan, handle, label, to_disk=True)

    def save_all(self, on_device: Iterable[tuple[int, Label]]) -> None:
        """Write the cached blocks to disk by the next plans: those used last, as many
        as it holds.

        Args:
          on_device: handles and what they name, the longest unused first.
        """
        if not self._disk_blocks:
            return
        device = list(on_device)
        keys = {label.key for _, label in device}
        host = [(-1, label) for label in self.host.labels() if label.key not in keys]
        latest = _parents_first(reversed(host + device))
        self._to_save = latest[: self._disk_blocks][::-1]
        for _, label in self._to_save:  # what is there makes no room for the others
            self.disk.use([label.key])

    def keep(
        self,
        plan: PlanBuilder,
        handle: int,
        label: Label,
        *,
        request: int | None = None,
        promised: bool = False,
        to_disk: bool = False,
    ) -> bool:
        """Copy a block of the device down, unless it is there; whether it is then.

        Args:
          request: that it is copied for, if for one.
          promised: into a block of the pool that was set aside.
          to_disk: not into the pool.
        """
        key, payloads = label.key, self.payloads
        name = self.host.payload(key)
        payloads.promised -= promised
        if name is None and not to_disk and self._make_room(plan):
            name = payloads.new("pool", request=request)
            plan.spill_handle(name, handle)
            self.host.add(label, name)
        through = to_disk or self._write == "through" or name is None
        if through and self._disk_blocks and key not in self.disk:
            if not self._room_for_save(name):
                self.counters.skipped_saves += 1
            elif name is None:
                name = payloads.new("window", request=request)
                plan.spill_handle(name, handle)
                self._save(plan, name, label)
            else:
                self._save(plan, name, label)
        return self.holds(key)

    def evicted(self, plan: PlanBuilder, handle: int, label: Label) -> bool:
        """A block leaves the device in this plan, where nobody keeps a copy for
        himself; whether it is in a tier then."""
        kept = self.holds(label.key)
        if not kept or (self.payloads.size("pool") and label.key not in self.host):
            if self._write != "never":
                kept = self.keep(plan, handle, label)
        if not kept:
            self.left(label.key)
        return kept

    def make_room(self, plan: PlanBuilder, blocks: int) -> None:
        """Evict from the pool until so many blocks are free; there must be room."""
        while self.payloads.free("pool") < blocks:
            self._evict_from_host(plan)

    def _make_room(self, plan: PlanBuilder) -> bool:
        """Free a block of the pool, if it can be."""
        if self.room_in_pool() <= 0:
            return False
        self.make_room(plan, 1)
        return True

    def _evict_from_host(self, plan: PlanBuilder) -> None:
        key = self.host.victim()
        assert key is not None, "room was promised that is not there"
        label = self.host.label(key)
        name = self.host.payload(key)
        assert name is not None
        if self._disk_blocks and key not in self.disk and self._write != "never":
            if self._room_for_save(name):
                self._save(plan, name, label)
            else:
                self.counters.skipped_saves += 1
        if key not in self.host:
            return  # it went with those before it, to make room
        self.host.remove(key)
        self.payloads.let_go(name, "pool")
        self.left(key)

    def _room_for_save(self, name: int | None = None) -> bool:
        """Make room on disk for a payload; False if it cannot be written now."""
        if self.payloads.free("window") <= 0 or name in self._saving:
            return False
        while self.disk_used >= self._disk_blocks:
            key = self.disk.victim()
            if key is None:
                return False
            self._erase(key)
        # What is written may itself have left with a block before it.
        return name is None or self.payloads.holds(name)

    def _trim_disk(self) -> None:
        while self.disk_used > self._disk_blocks:
            key = self.disk.victim()
            if key is None:
                return
            self._erase(key)

    def _erase(self, key: bytes) -> None:
        self._erase_file(self.disk.label(key))
        self.disk.remove(key)
        self._unready.discard(key)
        self.left(key)

    def _erase_file(self, label: Label) -> None:
        self._erased.append(Erase(label, self._saves))

    def _save(self, plan: PlanBuilder, name: int, label: Label) -> None:
        self.payloads.hold(name, "window")
        self._saving[name] = label
        plan.save.append(Save(name, label))
        self._saves = len(plan.save)
        if label.parent == NO_KEY:
            self._private[name] = False
        else:
            self._unready.add(label.key)
            self.disk.add(label)

    def left(self, key: bytes) -> None:
        """A block left a tier: in none, those behind it cannot be found any more."""
        gone = [key]
        while gone:
            key = gone.pop()
            if self.holds(key) or self._on_device(key):
                continue
            for child in self.host.children(key):
                name = self.host.remove(child)
                assert name is not None
                self.payloads.let_go(name, "pool")
                self.counters.unreachable_blocks += 1
                gone.append(child)
            for child in self.disk.children(key):
                self._erase_file(self.disk.label(child))
                self.disk.remove(child)
                self._unready.discard(child)
                self.counters.unreachable_blocks += 1
                gone.append(child)

    # Swapped requests on disk ---------------------------------------------------------

    def swap_column(
        self, plan: PlanBuilder, slot: int, column: int, *, request: int
    ) -> int:
        """Copy a request's private column to disk, for which there must be room."""
        room = self._room_for_save()
        assert room, "a request is swapped to a disk that has no room"
        name = self.payloads.new("window", request=request)
        plan.spill_column(name, slot, column)
        self._save(plan, name, _private(name))
        return name

    def swapped(self, name: int) -> Place | Literal["coming", "lost"]:
        """Where a private column is."""
        there = self._private.get(name)
        if there is None:
            return "lost"
        return Place("disk", label=_private(name)) if there else "coming"

    def forget_swapped(self, name: int) -> None:
        """A private column on disk is not needed any more."""
        if self._private.pop(name, None) is not None:
            self._erase_file(_private(name))

    # Up -------------------------------------------------------------------------------

    def can_load(self, blocks: int) -> bool:
        """Whether so many blocks can be loaded now."""
        return blocks <= self.payloads.free("window")

    def load(self, plan: PlanBuilder, label: Label, *, request: int) -> int:
        """Read a block from disk into the window, where there must be room.

        Returns its payload, of which who asks lets go by `unload`.
        """
        name = self.payloads.new("window", request=request)
        self._loading[name] = label
        plan.load.append(Load(name, label))
        return name

    def unload(self, name: int) -> None:
        """A payload that was asked for is not needed, or is fetched by this plan."""
        if name in self._loading:
            self._abandoned.add(name)  # it is written to until it has come
        else:
            self.payloads.let_go(name, "window")

    # Reports --------------------------------------------------------------------------

    def arrived(self, arrived: Arrived) -> None:
        """Take in what has been saved, loaded, found and lost."""
        for name in arrived.done:
            label = self._saving.pop(name, None)
            if label is None:
                self._loaded(name, self._loading.pop(name))
                continue
            self.counters.saved_blocks += 1
            if name in self._private:
                self._private[name] = True
            elif self._written_by(name, label):
                self._unready.discard(label.key)
            self.payloads.let_go(name, "window")
        for name in arrived.failed:
            label = self._saving.pop(name, None)
            if label is not None:
                self.counters.failed_saves += 1
                self._private.pop(name, None)
                self.payloads.let_go(name, "window")
            else:
                label = self._loading.pop(name)
                self._abandoned.discard(name)
                self.payloads.vanish(name)
                self.counters.failed_loads += 1
                self._private.pop(int.from_bytes(label.key, "little"), None)
            if self._written_by(name, label):
                self._lose(label.key)
                self._erase_file(label)  # whatever is there is no use
        for label in arrived.found:
            if label.key not in self.disk:
                self.disk.add(label)
                self._trim_disk()
        for key in arrived.gone:
            if key not in self._unready:
                self._lose(key)

    def _written_by(self, name: int, label: Label) -> bool:
        """Whether no other payload is being written for the same block."""
        return all(other.key != label.key for other in self._saving.values())

    def _loaded(self, name: int, label: Label) -> None:
        self.counters.loaded_blocks += 1
        self.payloads.came([name])
        shared = label.parent != NO_KEY and label.key not in self.host
        # Kept in the pool while it is free: what is evicted for it would be nearer.
        if shared and label.key in self.disk and self.payloads.free("pool") > 0:
            self.payloads.hold(name, "pool")
            self.host.add(label, name)
        if name in self._abandoned:
            self._abandoned.remove(name)
            self.payloads.let_go(name, "window")

    def _lose(self, key: bytes) -> None:
        if key in self.disk:
            self.disk.remove(key)
            self._unready.discard(key)
            self.left(key)

    def clear(self) -> None:
        """Forget every cached block."""
        self._named.clear()
        self._to_save.clear()
        for label in self.host.labels():
            name = self.host.remove(label.key)
            assert name is not None
            self.payloads.let_go(name, "pool")
        for label in self.disk.labels():
            self._erase_file(label)
            self.disk.remove(label.key)
        self._unready.clear()

    def flush(self, plan: PlanBuilder) -> None:
        """Erase and drop in this plan what was let go of."""
        plan.erase += self._erased
        self._erased.clear()
        self._saves = 0
        self.payloads.flush(plan)

    def holds_nothing(self) -> bool:
        """Whether nothing is kept for a request, or on its way."""
        mine = self._saving or self._loading or self._private or self._named
        pinned = not (self.host.holds_no_pins() and self.disk.holds_no_pins())
        window = self.payloads.used("window")
        return not (mine or pinned or window or self._erased)


def _parents_first(blocks: Iterable[tuple[int, Label]]) -> list[tuple[int, Label]]:
    """The blocks in their order, but none before the one it follows."""
    left = {label.key: (handle, label) for handle, label in blocks}
    ordered: list[tuple[int, Label]] = []
    for key in list(left):
        chain: list[tuple[int, Label]] = []
        while key in left:
            chain.append(left.pop(key))
            key = chain[-1][1].parent
        ordered += reversed(chain)
    return ordered


def _private(name: int) -> Label:
    """The label of a swapped request's column on disk."""
    return Label(name.to_bytes(16, "little"), NO_KEY)
