"""Sampling parameters of rows, and float64 probabilities to compare with."""

from __future__ import annotations

import numpy as np

from jaxserve.device.sampling import RowParams

ROWS, VOCAB = 8, 24
NO_TABLES = 9  # past the slots of the harness's shape


def rows(count: int, *, barred: object = None, **fields: object) -> RowParams:
    """Row parameters; a scalar stands for every row. Neutral unless given."""
    neutral = {
        "sample_index": (0, np.int32),
        "position": (np.arange(count), np.int32),
        "temperature": (1.0, np.float32),
        "top_k": (0, np.int32),
        "top_p": (1.0, np.float32),
        "min_p": (0.0, np.float32),
        "tables": (NO_TABLES, np.int32),
    }
    seed = np.broadcast_to(np.asarray(fields.pop("seed", 0), np.uint64), count)
    key = np.stack([seed >> np.uint64(32), seed & np.uint64(0xFFFFFFFF)], axis=1)
    if barred is None:
        barred = np.full((count, 2), -1)
    made = {
        name: np.broadcast_to(np.asarray(fields.pop(name, value), dtype), count)
        for name, (value, dtype) in neutral.items()
    }
    assert not fields
    return RowParams(
        key=key.astype(np.uint32), barred=np.asarray(barred, np.int32), **made
    )


def softmax(logits: np.ndarray) -> np.ndarray:
    """Float64 probabilities."""
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()
