"""The parameters of the tiny models of other families, from their names alone.

They are noise, so the fixtures hold names and shapes, and the tests make the numbers.
"""

from __future__ import annotations

import zlib

import numpy as np


def noise(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """f32 of `shape`. RandomState, whose numbers no release of NumPy may change."""
    rng = np.random.RandomState(zlib.crc32(name.encode()))
    # Initial norms of one and biases of zero would hide what is not applied.
    centre = 1.0 if "norm" in name else 0.0
    scale = 0.3 if len(shape) == 1 else 1.2 / np.sqrt(shape[-1])
    return (centre + scale * rng.standard_normal(shape)).astype(np.float32)
