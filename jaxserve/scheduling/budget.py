"""The host's guarantee: how many blocks are sure, and making more of them sure.

Owns the count of blocks ahead of the device (upper bounds of every launch planned) and
eviction. The only place that decides whether something fits. Never sees a request's
tokens or a physical block.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxserve.block_count import BlockCount
from jaxserve.config import EngineShape
from jaxserve.scheduling.plan_builder import PlanBuilder
from jaxserve.scheduling.prefix_index import PrefixIndex
from jaxserve.scheduling.swap_space import SwapSpace


class Budget:
    """Blocks that are certain to be free when the plan being built runs.

    Args:
      swaps: hears of every block that is evicted.
    """

    def __init__(self, shape: EngineShape, index: PrefixIndex, swaps: SwapSpace):
        self._shape = shape
        self._index = index
        self._swaps = swaps
        self.count = BlockCount(shape)

    def possible(self) -> int:
        """Blocks that are free or cached for nobody."""
        return self.count.free + self._index.evictable

    def after_release(self, victims: Iterable[tuple[int, list[int]]]) -> int:
        """What `possible` would be with slots released: (slot, its handles) each."""
        gain, dropped = 0, {}
        for slot, handles in victims:
            gain += self.count.private(slot)
            for handle in handles:
                dropped[handle] = dropped.get(handle, 0) + 1
        gain += sum(self._index.pins(h) == n for h, n in dropped.items())
        return self.possible() + gain

    def secure(self, plan: PlanBuilder, blocks: int) -> int:
        """Evict until `blocks` are free, as far as possible; return how many are."""
        while self.count.free < blocks and self._index.evictable and plan.can_retire:
            self.evict(plan, self._index.oldest)
        return min(self.count.free, blocks)

    def evict(self, plan: PlanBuilder, handle: int) -> None:
        """Forget a cached block that nobody uses; the plan has room to retire it."""
        label = self._index.label(handle)
        self._index.evict(handle)
        self._swaps.evicted(plan, handle, label)
        plan.retire.append(handle)
        self.count.retire(1)

    def extend(self, plan: PlanBuilder, slot: int, length: int) -> int:
        """The longest length up to `length` that the slot can be sure of.

        Evicts what it needs. The slot is not resized: that is the caller's promise.
        """
        held = self._shape.blocks(self.count.length[slot])
        if length <= held * self._shape.block_size:
            return length
        sure = self.secure(plan, max(0, self._shape.blocks(length) - held))
        return min(length, (held + sure) * self._shape.block_size)
