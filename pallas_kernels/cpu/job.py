"""What one attention call works on: words that every core reads, and its tiles."""

from __future__ import annotations

from numba import njit

from pallas_kernels.cpu import vector as vec

STRIDE = 64
"""Positions that one round of the softmax takes in."""

MAX_QUERIES = 96
"""Queries of a tile for one KV head, save where one token alone has more."""

# Words of a job. Addresses:
(
    Q,  # [T, Hq, D]
    OUT,  # [T, Hq, D]
    PAGES,  # [NP, B, Hkv, 2, D]
    TABLE,  # i32[R, M]
    KV_LENS,  # i32[R]
    CU_Q_LENS,  # i32[R + 1]
    TILES,  # i32[tiles, TILE_WORDS]
    LEADERS,  # i32[R] row that a decode row shares its first strides with, or -1
    STRIDES,  # i32[R] strides of a row that are done with those of others
    ORDER,  # i32[R] rows, leader by leader
    STATE,  # f32[R, Hq, D + 2] sums, largest score and norm after these strides
) = range(11)
# Sizes and options:
ROWS, TOKENS, COLUMNS, BLOCK, KV_HEADS, GROUPS, HEAD, SCALE, WINDOW = range(11, 20)
# Of the loop that runs: its tiles, and in how many parts a tile's heads fall.
FIRST_TILE, STOP_TILE, PARTS = 20, 21, 22
JOB_WORDS = 23

TILE_WORDS = 4
"""Row whose blocks are read; first token of the row's, or place in ORDER; how many
tokens; and 1 for a tile of decode rows that share blocks."""


def tile_tokens(groups: int) -> int:
    """How many tokens make a tile."""
    return max(1, MAX_QUERIES // groups)


@njit(inline="always")
def get(job, field):
    """A word of a job."""
    return vec.load_i64(job + 8 * field)


@njit(inline="always")
def item(job, field, index):
    """An element of an i32 array of a job."""
    return vec.load_i32(get(job, field) + 4 * index)


@njit(inline="always")
def set_item(job, field, index, value):
    """Set an element of an i32 array of a job."""
    vec.store_i32(get(job, field) + 4 * index, value)
