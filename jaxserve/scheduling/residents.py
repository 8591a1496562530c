"""The requests that hold a slot: their columns, named or private, and their slots.

Owns slots and which columns have names; keeps the budget and the prefix index in step
with what a plan will do. Never decides who runs.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxserve.config import EngineShape
from jaxserve.core import Request
from jaxserve.moves import Fetch, Label, Restore
from jaxserve.scheduling.budget import Budget
from jaxserve.scheduling.plan_builder import PlanBuilder
from jaxserve.scheduling.prefix_index import (
    PrefixIndex,
    extend_keys,
    root_key,
    salt_tag,
)
from jaxserve.scheduling.running import Running
from jaxserve.scheduling.swap_space import SwapSpace


class Restored(NamedTuple):
    """What a request gets back from below the device, behind its cached columns."""

    fetches: tuple[Fetch, ...]  # what has been fetched for it
    rows: int  # KV rows it then has
    context: int  # tokens to compute before sampling
    from_disk: int  # blocks that were on disk
    resumed: bool = False  # it was swapped; else they were found in the prefix cache
    source: int | None = None  # slot whose column is copied


class Residents:
    """Requests in slots.

    Args:
      shape: static sizes.
      caching: whether columns are named, so that others can share them.
      index: names of cached blocks.
      swaps: keeps preempted requests below the device.
    """

    def __init__(
        self,
        shape: EngineShape,
        index: PrefixIndex,
        swaps: SwapSpace,
        *,
        caching: bool,
    ):
        self._shape = shape
        self._caching = caching
        self._free_slots = list(range(shape.max_slots - 1, -1, -1))
        self._producers: dict[bytes, Running] = {}  # who will name a key
        self.running: dict[int, Running] = {}  # by submission index
        self.index = index
        self.budget = Budget(shape, index, swaps)
        self._tiers = swaps.tiers
        # Keys that only a family finds, by its index.
        self._anonymous: dict[int, list[bytes]] = {}
        self._plan = 0  # number of the plan being built
        self.outstanding = 0  # blocks that running requests need for their prompts
        self.weight_version = 0  # enters every key
        self.lost_blocks = 0  # full columns that were given up without a name

    @property
    def slot_free(self) -> bool:
        """Whether a slot is free in the plan being built."""
        return bool(self._free_slots)

    def extend_keys(self, request: Request, known: list[bytes]) -> None:
        """Extend `known` to the keys of every full block of known tokens."""
        named = self._caching or request.family is not None
        size = self._shape.block_size
        if named and (len(known) + 1) * size <= request.num_tokens:
            root = self._root(request)
            tokens = request.tokens(0, request.num_tokens)
            extend_keys(known, root, tokens, size)

    def _root(self, request: Request) -> bytes:
        family = None if self._caching else request.stream
        return root_key(request.cache_salt, self.weight_version, family)

    def leave_family(self, request: Request) -> None:
        """A request ended: what only its family could find goes with the last of it."""
        family = request.family
        if family is None:
            return
        family.alive -= 1
        if not (self._caching or family.alive):
            self.index.forget(self._anonymous.pop(family.index, ()))

    def label(self, request: Request, keys: list[bytes], column: int) -> Label:
        """What names the block of one of a request's full columns, in any tier."""
        return Label(
            keys[column],
            keys[column - 1] if column else self._root(request),
            column,
            self.weight_version,
            salt_tag(request.cache_salt),
        )

    def match(self, request: Request, keys: list[bytes]) -> tuple[int, list[int]]:
        """(columns it could adopt if all were cached, handles of those that are).

        A fully cached context still computes its last token, to sample from. One that
        does not read the cache takes back no more than it has computed. Extends
        `keys`, the known ones of the request.
        """
        self.extend_keys(request, keys)
        rows = request.num_tokens - 1
        if not request.params.reads_cache:
            rows = min(rows, request.computed.rows)
        usable = keys[: rows // self._shape.block_size]
        return len(usable), self.index.match(usable)

    def begin_plan(self) -> None:
        """Another plan is being built."""
        self._plan += 1
        self.index.begin_plan()

    def produced_soon(self, key: bytes) -> bool:
        """Whether the block of `key` will have a name soon: worth waiting for.

        Only a producer that had a row in the last plan or has one in this counts, so
        that nobody waits for one that does not run.
        """
        producer = self._producers.get(key)
        if producer is not None:
            return self.runs(producer)
        return self.index.find(key) is not None

    def runs(self, running: Running) -> bool:
        """Whether a request had a row in the last plan, or has one in this."""
        return running.placed >= self._plan - 1

    @property
    def holds_nothing(self) -> bool:
        """Whether no map has an entry of a request left."""
        return not (self.running or self._producers or self._anonymous)

    def source(self, request: Request) -> Running | None:
        """Whose column a fork that has sampled nothing itself can copy: who has rows of
        all the tokens that they share when the plan has run, if anybody has."""
        for running in self.running.values():
            other = running.request
            same = other.forked_from == request.forked_from
            akin = other.index == request.forked_from or (
                same and other.shared == request.shared
            )
            current = running.weight_version == self.weight_version
            if akin and current and running.known_rows >= request.shared:
                return running
        return None

    def needs(self, running: Running) -> int:
        """Blocks that the request still needs to finish its prompt."""
        blocks = self._shape.blocks
        return max(0, blocks(running.context) - blocks(running.planned))

    def take(
        self,
        plan: PlanBuilder,
        request: Request,
        keys: list[bytes],
        hits: list[int],
        restored: Restored | None = None,
    ) -> Running:
        """Give the request a slot and the cached columns `hits`, pinned before.

        Args:
          restored: what it gets back from below the device behind them.
        """
        slot = self._free_slots.pop()
        cached = len(hits) * self._shape.block_size
        rows = cached if restored is None else restored.rows
        found = cached if restored and restored.resumed else rows
        running = Running(
            request=request,
            slot=slot,
            context=request.num_tokens if restored is None else restored.context,
            planned=rows,
            rows=rows,
            cached=found,
            keys=keys,
            handles=list(hits),
            placed=self._plan,
            weight_version=self.weight_version,
        )
        plan.adopt += [(slot, column, handle) for column, handle in enumerate(hits)]
        plan.take_slot(slot, request)
        self.budget.count.adopt(slot, len(hits))
        if restored is not None:
            self.budget.count.resize(slot, rows)
            last = request.output[-1] if request.output else 0
            order = Restore(
                slot, len(hits), restored.fetches, rows, last, restored.source
            )
            plan.restore.append(order)
        self.running[request.index] = running
        self.outstanding += self.needs(running)
        for key in keys[len(hits) :]:
            self._producers.setdefault(key, running)
        return running

    def resize(self, running: Running, planned: int) -> None:
        """Correct the KV rows after the launches planned so far, at most."""
        if running.planned < running.context or planned < running.context:
            needed = self.needs(running)
            running.planned = planned
            self.outstanding += self.needs(running) - needed
        else:
            running.planned = planned
        self.budget.count.resize(running.slot, planned)

    def place(self, running: Running, planned: int) -> None:
        """The request has a row in this plan, up to `planned` KV rows."""
        running.placed = self._plan
        self.resize(running, planned)

    def name_columns(
        self, plan: PlanBuilder, running: Running, rows: int, *, fresh: bool
    ) -> None:
        """Name the full columns of the first `rows` KV rows that have no name yet.

        Args:
          fresh: they are written by this plan, and named after its mixed step; else
            they were written by earlier ones, and are named before anything else.
        """
        if running.weight_version != self.weight_version:
            return  # its KV is of other weights: nobody may find it
        full = min(rows // self._shape.block_size, len(running.keys))
        for column in range(len(running.handles), full):
            handle = self._handle_for(plan, running, column, fresh=fresh)
            if handle is None:
                return
            running.handles.append(handle)
            if self._producers.get(running.keys[column]) is running:
                del self._producers[running.keys[column]]

    def _handle_for(
        self, plan: PlanBuilder, running: Running, column: int, *, fresh: bool
    ) -> int | None:
        """A pinned handle for a private full column: its own, or the one it doubles.

        None if the plan or the handles have no room.
        """
        key = running.keys[column]
        handle = self.index.find(key)
        if handle is not None and not self._forget(plan, handle):
            # Others use the block of this name: ours stays private beside it.
            self.index.pin([handle])
            running.doubles.add(column)
            return handle
        edits = plan.publish if fresh else plan.seal
        if not plan.can_name(edits):
            return None
        label = self.label(running.request, running.keys, column)
        handle = self.index.publish(label, fresh=fresh)
        if handle is not None:
            if not self._caching:
                family = self._anonymous.setdefault(running.request.stream, [])
                family.append(label.key)
            self._tiers.named(handle, label)
            edits.append((running.slot, column, handle))
            self.budget.count.name(running.slot)
            running.doubles.discard(column)
        return handle

    def _forget(self, plan: PlanBuilder, handle: int) -> bool:
        """Retire a handle that nobody pins; False if somebody does."""
        if self.index.pins(handle) or not plan.can_retire:
            return False
        self.budget.evict(plan, handle)
        return True

    def _merge_doubles(self, plan: PlanBuilder, running: Running) -> None:
        """Where only this request still uses the other block of a double, keep its own.

        So a request holds no more blocks than its length needs for long, and one that
        fits in memory alone can always finish.
        """
        for column in sorted(running.doubles):
            handle = running.handles[column]
            if self.index.pins(handle) > 1 or not plan.can_name(plan.seal):
                continue
            self.index.unpin([handle])
            if not self._forget(plan, handle):
                self.index.pin([handle])
                return
            own = self._handle_for(plan, running, column, fresh=False)
            assert own is not None, "H = P + K handles, and one was just let go"
            running.handles[column] = own

    def name_known(self, plan: PlanBuilder, running: Running) -> None:
        """Name the full columns whose rows are written and whose tokens are known."""
        family = running.request.family
        if not (self._caching or (family and family.alive)):
            return  # nobody will look for them
        self._merge_doubles(plan, running)
        rows = running.known_rows
        current = running.weight_version == self.weight_version
        if current and rows // self._shape.block_size > len(running.handles):
            self.extend_keys(running.request, running.keys)
            self.name_columns(plan, running, rows, fresh=False)

    def release(self, plan: PlanBuilder, running: Running) -> None:
        """Take the slot back, naming first what can be named."""
        self.name_known(plan, running)
        if self._caching:
            full = running.planned // self._shape.block_size
            self.lost_blocks += full - len(running.handles)
        self.index.unpin(running.handles)
        for key in running.keys:
            if self._producers.get(key) is running:
                del self._producers[key]
        self.budget.count.release(running.slot)
        plan.release.append(running.slot)
        self._free_slots.append(running.slot)
        running.released = True
        del self.running[running.request.index]
        self.outstanding -= self.needs(running)

    def flush(self, plan: PlanBuilder) -> None:
        """Retire the cached blocks that `PrefixIndex.reset` forgot, K a plan."""
        while self.index.has_forgotten and plan.can_retire:
            self.budget.evict(plan, self.index.oldest)
