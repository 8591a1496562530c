"""Host memory that blocks lie in on their way to the device, used again and again.

Owns that memory, and when it may be written to once more. Never sees what a block is
for.

Fresh memory is paid for page by page at its first touch, which takes many times as long
as the copy into it. And on a CPU a device array of aligned host memory is that memory:
it has to stay as it is until all that reads the array has run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

Buffers = dict[str, np.ndarray]
"""Room for blocks, [size, fold, ...] of each group of pages."""

_ALIGNMENT = 64  # bytes, of an array that a CPU device takes without a copy
_KEPT = 128  # blocks of each size; whatever comes back at once beyond is fresh memory


class Staging:
    """Buffers for blocks of one state's pages. One thread at a time.

    Args:
      pages: of the state. num_blocks: that they hold.
    """

    def __init__(self, pages: Mapping[str, jax.ShapeDtypeStruct], num_blocks: int):
        self._blocks = {  # shape and type of one
            group: ((rows.shape[0] // num_blocks, *rows.shape[1:]), rows.dtype)
            for group, rows in pages.items()
        }
        self._kept = min(_KEPT, num_blocks)  # more do not come back at once
        self._free: defaultdict[int, list[Buffers]] = defaultdict(list)
        self._lent: list[tuple[Any, Buffers]] = []

    def take(self, size: int) -> Buffers:
        """Buffers for so many blocks, with anything in them."""
        lent, self._lent = self._lent, []
        for after, buffers in lent:
            self.give(buffers, after)
        free = self._free[size]
        return free.pop() if free else self._make(size)

    def give(self, buffers: Buffers, after: Any = None) -> None:
        """Take buffers back.

        Args:
          after: an array that is there, and not donated, when all that reads them has
            run; None: it has.
        """
        if after is not None and not after.is_ready():
            self._lent.append((after, buffers))
            return
        size = len(next(iter(buffers.values())))
        if self._room(size) > 0:
            self._free[size].append(buffers)

    def warm_up(self, size: int) -> None:
        """Touch the memory of as many buffers as are kept."""
        for _ in range(self._room(size)):
            buffers = self._make(size)
            for rows in buffers.values():
                rows[:] = 0
            self.give(buffers)

    def _room(self, size: int) -> int:
        """How many more buffers of a size are kept."""
        return max(self._kept // size, 1) - len(self._free[size])

    def _make(self, size: int) -> Buffers:
        return {
            group: _aligned((size, *shape), dtype)
            for group, (shape, dtype) in self._blocks.items()
        }


def _aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    room = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    return room[start : start + num_bytes].view(dtype).reshape(shape)
