"""Ragged batches for the attention suite: random values where a token may look, NaN in
every KV row that none may."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np


class Shape(NamedTuple):
    """What fixes a compiled program; see the axes in `pallas_kernels.api`."""

    tokens: int = 64  # T
    rows: int = 8  # R
    columns: int = 20  # M
    block: int = 16  # B
    kv_heads: int = 3  # Hkv
    groups: int = 3  # Hq // Hkv
    head_size: int = 64  # D
    q_dtype: str = "float32"
    kv_dtype: str = "float32"

    @property
    def capacity(self) -> int:
        """KV rows that a full table reaches."""
        return self.columns * self.block


class Batch(NamedTuple):
    """The arguments of `paged_attention`, as NumPy arrays."""

    q: np.ndarray  # [T, Hq, D]
    pages: np.ndarray  # [NP, B, Hkv, 2, D]
    table: np.ndarray  # i32[R, M]
    kv_lens: np.ndarray  # i32[R]
    cu_q_lens: np.ndarray  # i32[R + 1]
    num_decode: np.ndarray  # i32[]


def make_batch(
    shape: Shape,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    num_decode: int | None = None,
    shared: Sequence[tuple[Sequence[int], slice]] = (),
    seed: int = 0,
) -> Batch:
    """A batch whose first rows have these lengths; further rows are padding.

    Each row's blocks lie anywhere in the pool and its unused columns name pages of
    other rows. num_decode None counts the leading rows of one token. For each (rows,
    columns) of `shared`, these columns of these rows hold the same blocks.
    """
    rng = np.random.default_rng(seed)
    q_lens = np.array([*q_lens, *[0] * (shape.rows - len(q_lens))], np.int32)
    kv_lens = np.array([*kv_lens, *[0] * (shape.rows - len(kv_lens))], np.int32)
    if num_decode is None:
        num_decode = int(np.argmax(np.append(q_lens, 0) != 1))
    num_pages = shape.rows * shape.columns + 2
    table = rng.permutation(num_pages)[: shape.rows * shape.columns]
    table = table.reshape(shape.rows, shape.columns).astype(np.int32)
    for members, columns in shared:
        table[members, columns] = table[members[0], columns]
    page_shape = (num_pages, shape.block, shape.kv_heads, 2, shape.head_size)
    pages = np.full(page_shape, np.nan, np.float32)
    for row, kv_len in enumerate(kv_lens):
        # A shared block is filled as far as the longest of its rows reaches.
        for column in range(-(-kv_len // shape.block)):
            page = pages[table[row, column]][: kv_len - column * shape.block]
            fresh = rng.standard_normal(page.shape, np.float32)
            page[...] = np.where(np.isnan(page), fresh, page)
    for row, kv_len in enumerate(kv_lens):
        unused = -(-kv_len // shape.block)
        table[row, unused:] = rng.integers(num_pages, size=shape.columns - unused)
    q_shape = (shape.tokens, shape.kv_heads * shape.groups, shape.head_size)
    return Batch(
        q=rng.standard_normal(q_shape, np.float32).astype(jnp.dtype(shape.q_dtype)),
        pages=pages.astype(jnp.dtype(shape.kv_dtype)),
        table=table,
        kv_lens=kv_lens,
        cu_q_lens=np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32),
        num_decode=np.int32(num_decode),
    )


def part_of(
    batch: Batch,
    row: int,
    part: slice = slice(None),
    *,
    at: int = 0,
    tokens: int | None = None,
    rows: int | None = None,
) -> tuple[Batch, slice]:
    """These tokens of one row alone, as row `at` of a batch, and where they are in it.

    Rows before it are idle: of one token each before a part of one token, which becomes
    a decode row, and of none before a chunk. Sizes are those of `batch` unless given.
    """
    tokens = len(batch.q) if tokens is None else tokens
    rows = len(batch.kv_lens) if rows is None else rows
    row_start, row_stop = batch.cu_q_lens[row : row + 2]
    first, last, _ = part.indices(row_stop - row_start)
    count = last - first
    is_decode = count == 1
    q_lens = np.zeros(rows, np.int32)
    q_lens[:at] = is_decode
    q_lens[at] = count
    cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    where = slice(cu_q_lens[at], cu_q_lens[at + 1])
    q = np.zeros((tokens, *batch.q.shape[1:]), batch.q.dtype)
    q[where] = batch.q[row_start + first : row_start + last]
    table = np.zeros((rows, batch.table.shape[1]), np.int32)
    table[at] = batch.table[row]
    kv_lens = np.zeros(rows, np.int32)
    kv_lens[at] = batch.kv_lens[row] - (row_stop - row_start) + last
    num_decode = np.int32(at + 1 if is_decode else 0)
    return Batch(q, batch.pages, table, kv_lens, cu_q_lens, num_decode), where
