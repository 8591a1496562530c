"""Batches for `rotary_attention`, and what NumPy float64 makes of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tests.kernels.batches import Batch

NOWHERE = 2**31 - 1
"""A page id that writes nothing."""


class KvBatch(NamedTuple):
    """The arguments of `rotary_attention`, as NumPy arrays."""

    qkv: np.ndarray  # f32[T, Hq + 2 Hkv, D]
    cos: np.ndarray  # f32[T, D / 2]
    sin: np.ndarray  # f32[T, D / 2]
    pages: np.ndarray  # [NP, B, Hkv, 2, D]
    page_ids: np.ndarray  # i32[T]
    offsets: np.ndarray  # i32[T]
    table: np.ndarray  # i32[R, M]
    kv_lens: np.ndarray  # i32[R]
    cu_q_lens: np.ndarray  # i32[R + 1]
    num_decode: np.ndarray  # i32[]


def make_kv_batch(batch: Batch, seed: int = 0) -> KvBatch:
    """Keys and values for a batch's tokens, whose KV rows hold NaN before.

    Tokens of rows without KV, and those of no row, write nothing.
    """
    rng = np.random.default_rng(seed)
    tokens, heads, head_size = batch.q.shape
    block, kv_heads = batch.pages.shape[1:3]
    angles = rng.uniform(0, 2 * np.pi, (tokens, head_size // 2))
    page_ids = np.full(tokens, NOWHERE, np.int32)
    offsets = np.zeros(tokens, np.int32)
    for row, kv_len in enumerate(batch.kv_lens):
        start, stop = batch.cu_q_lens[row : row + 2]
        if kv_len > 0:
            positions = np.arange(kv_len - (stop - start), kv_len)
            page_ids[start:stop] = batch.table[row, positions // block]
            offsets[start:stop] = positions % block
    pages = batch.pages.copy()
    own = page_ids < NOWHERE
    pages[page_ids[own], offsets[own]] = np.nan
    shape = (tokens, heads + 2 * kv_heads, head_size)
    return KvBatch(
        rng.standard_normal(shape, np.float32),
        np.cos(angles).astype(np.float32),
        np.sin(angles).astype(np.float32),
        pages,
        page_ids,
        offsets,
        *batch[2:],
    )


def _rotate(x: np.ndarray, batch: KvBatch) -> np.ndarray:
    """Each pair (x[i], x[i + D/2]) as a complex number, turned."""
    half = x.shape[-1] // 2
    turn = batch.cos.astype(np.float64) + 1j * batch.sin
    pairs = (x[..., :half] + 1j * x[..., half:].astype(np.float64)) * turn[:, None]
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def rotated(batch: KvBatch) -> np.ndarray:
    """The queries, f64[T, Hq, D]."""
    return _rotate(batch.qkv[:, : -2 * batch.pages.shape[2]], batch)


def written(batch: KvBatch) -> np.ndarray:
    """The pages with the batch's KV in them, of their dtype."""
    kv_heads = batch.pages.shape[2]
    pages = batch.pages.copy()
    own = batch.page_ids < NOWHERE
    at = batch.page_ids[own], batch.offsets[own]
    keys = _rotate(batch.qkv[:, -2 * kv_heads : -kv_heads], batch)
    pages[(*at, slice(None), 0)] = keys[own].astype(pages.dtype)
    pages[(*at, slice(None), 1)] = batch.qkv[own, -kv_heads:].astype(pages.dtype)
    return pages
