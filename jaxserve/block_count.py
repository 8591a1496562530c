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
        blocks = self._shape.blocks
        self._private += blocks(length) - blocks(self.length[slot])
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
        for slot, _, handle in plan.seal.tolist():
            if handle >= h:
                break
            self.name(slot)
        for slot in plan.release.tolist():
            if slot >= s:
                break
            self.release(slot)
        self.retire(int((plan.retire < h).sum()))
        for slot, column, handle in plan.adopt.tolist():
            if handle >= h:
                break
            self.adopt(slot, column + 1)
        sampled = ran.sum(axis=0).tolist()
        for (slot, _), end, n in zip(
            plan.decode.tolist(), plan.chunk_end.tolist(), sampled, strict=True
        ):
            if slot >= s:
                break
            self.resize(slot, end + max(n - 1, 0) if end else self.length[slot] + n)
        for slot, _, handle in plan.publish.tolist():
            if handle >= h:
                break
            self.name(slot)
        return self.free
