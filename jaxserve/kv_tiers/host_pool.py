"""KV blocks in host memory, by payload name.

Owns the bytes. Never sees what a payload is for: the scheduler counts them and decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

Payload = Mapping[str, np.ndarray]
"""A block's rows in each group of pages: [fold, B, ...]."""


class HostPool:
    """Payloads of KV blocks."""

    def __init__(self) -> None:
        self._payloads: dict[int, Payload] = {}

    def __len__(self) -> int:
        return len(self._payloads)

    def put(self, names: Sequence[int], blocks: Payload) -> None:
        """Keep blocks [E, fold, ...], the first of which bear these names."""
        for i, name in enumerate(names):
            # Copied, for the blocks come with padding.
            self._payloads[name] = {k: v[i].copy() for k, v in blocks.items()}

    def add(self, name: int, payload: Payload) -> None:
        """Keep one block, as it is."""
        self._payloads[name] = payload

    def one(self, name: int) -> Payload:
        """The block of a name."""
        return self._payloads[name]

    def get(self, names: Sequence[int], out: Payload) -> None:
        """Copy blocks to the start of `out`, [len(names) or more, fold, ...]."""
        for i, name in enumerate(names):
            for group, rows in self._payloads[name].items():
                out[group][i] = rows

    def all(self) -> dict[int, Payload]:
        """Every block by name."""
        return dict(self._payloads)

    def replace(self, payloads: Mapping[int, Payload]) -> None:
        """Hold these and nothing else."""
        self._payloads = dict(payloads)

    def drop(self, names: Iterable[int]) -> None:
        """Forget payloads."""
        for name in names:
            del self._payloads[name]
