"""The count of free blocks: free = P - sum(ceil(len/B) - named columns) - live handles.

Owns that formula and its replay over plans. The scheduler runs it ahead on upper
bounds, the engine audits the device with it, and the simulated executor reports it.
Never sees a physical block id or what a handle names. A column is *named* once a handle
backs it.
"""

from __future__ import annotations

import numpy as np

from jaxserve.config import EngineShape
from jaxserve.core import StepPlan


class BlockCount:
    """Lengths and named columns of every slot, and the live handles, of one moment."""

    def __init__(self, shape: EngineShape):
        self._shape = shape
        self._size = shape.block_size
        self.length = [0] * shape.max_slots  # KV rows of each slot
        self.named = [0] * shape.max_slots  # its columns that a handle backs
        self.live = 0  # handles that hold a block
        self._private = 0  # blocks that only a slot owns

    @property
    def free(self) -> int:
        """Blocks nobody owns."""
        return self._shape.num_blocks - self._private - self.live

    def private(self, slot: int) -> int:
        """Blocks that come free when `slot` is released."""
        return self._shape.blocks(self.length[slot]) - self.named[slot]

    def resize(self, slot: int, length: int) -> None:
        """Set the KV rows of a slot."""
        size = self._size
        self._private += -(-length // size) + -self.length[slot] // size
        self.length[slot] = length

    def name(self, slot: int) -> None:
        """A new handle takes a share in one of the slot's private columns."""
        self.named[slot] += 1
        self._private -= 1
        self.live += 1

    def adopt(self, slot: int, columns: int) -> None:
        """An empty slot takes over `columns` full columns behind live handles."""
        self.length[slot] = columns * self._shape.block_size
        self.named[slot] = columns

    def release(self, slot: int) -> None:
        """The slot gives its columns back; the named ones live on behind handles."""
        self._private -= self.private(slot)
        self.length[slot] = self.named[slot] = 0

    def retire(self, handles: int) -> None:
        """Handles that no slot shares are forgotten."""
        self.live -= handles

    def equation(self) -> str:
        """The formula with its numbers, for an error message."""
        slots = " + ".join(
            f"(ceil({n}/{self._shape.block_size}) - {self.named[s]})"
            for s, n in enumerate(self.length)
            if n
        )
        return (
            f"free = P - slots - handles = {self._shape.num_blocks} - "
            f"({slots or 0}) - {self.live} = {self.free}"
        )

    def replay(self, plan: StepPlan, ran: np.ndarray) -> int:
        """Apply a plan that ran `ran` bool[N, R]; return the free blocks after it."""
        s, h = self._shape.max_slots, self._shape.num_handles
        for slot, _, _ in _listed(plan.seal, plan.seal[:, 2], h):
            self.name(slot)
        for slot in _listed(plan.release, plan.release, s):
            self.release(slot)
        self.retire(len(_listed(plan.retire, plan.retire, h)))
        for slot, column, _ in _listed(plan.adopt, plan.adopt[:, 2], h):
            self.adopt(slot, column + 1)
        sampled = ran.sum(axis=0).tolist()
        rows = zip(
            _listed(plan.decode, plan.decode[:, 0], s),
            plan.chunk_end.tolist(),
            sampled,
            strict=False,
        )
        for (slot, _), end, n in rows:
            self.resize(slot, end + max(n - 1, 0) if end else self.length[slot] + n)
        for slot, _, _ in _listed(plan.publish, plan.publish[:, 2], h):
            self.name(slot)
        return self.free


def _listed(entries: np.ndarray, names: np.ndarray, padding: int) -> list:
    """The entries of a plan's axis that are not padding; those come first."""
    if names[0] >= padding:
        return []
    return entries[: int(np.count_nonzero(names < padding))].tolist()
