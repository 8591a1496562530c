"""Which tiles a batch is cut into.

Blocks that several decode rows share are read once for all of them, by tiles that come
first and leave each row's sums behind (cascade attention: Ye et al., 2024; Hydragen:
Juravsky et al., 2024). A row then goes on alone where it stopped, so its sums run over
the same strides in the same order either way.
"""

from __future__ import annotations

from numba import njit

from pallas_kernels.cpu import job as j

_tile_tokens = njit(j.tile_tokens)


@njit
def _common_strides(job, row, other):
    """Leading strides, full in both rows, whose blocks are the same."""
    columns, block = j.get(job, j.COLUMNS), j.get(job, j.BLOCK)
    full = min(j.item(job, j.KV_LENS, row), j.item(job, j.KV_LENS, other)) // j.STRIDE
    column = 0
    while (
        column < columns
        and column * block < full * j.STRIDE
        and j.item(job, j.TABLE, row * columns + column)
        == j.item(job, j.TABLE, other * columns + column)
    ):
        column += 1
    return min(full, column * block // j.STRIDE)


@njit
def find_shared(job):
    """Fill LEADERS and STRIDES."""
    rows = j.get(job, j.ROWS)
    for row in range(rows):
        j.set_item(job, j.LEADERS, row, -1)
        j.set_item(job, j.STRIDES, row, 0)
    for row in range(rows):
        tokens = j.item(job, j.CU_Q_LENS, row + 1) - j.item(job, j.CU_Q_LENS, row)
        kv_len = j.item(job, j.KV_LENS, row)
        if tokens != 1 or kv_len < j.STRIDE or kv_len > j.get(job, j.WINDOW):
            continue
        j.set_item(job, j.LEADERS, row, row)
        for other in range(row):
            if j.item(job, j.LEADERS, other) != other:
                continue
            strides = _common_strides(job, row, other)
            if strides > 0:
                j.set_item(job, j.LEADERS, row, other)
                j.set_item(job, j.STRIDES, row, strides)
                # The leader goes as far as the one that shares most with it.
                most = max(strides, j.item(job, j.STRIDES, other))
                j.set_item(job, j.STRIDES, other, most)
                break


@njit
def _set_tile(job, number, row, first, count, shared):
    at = number * j.TILE_WORDS
    j.set_item(job, j.TILES, at, row)
    j.set_item(job, j.TILES, at + 1, first)
    j.set_item(job, j.TILES, at + 2, count)
    j.set_item(job, j.TILES, at + 3, shared)


@njit
def shared_tiles(job):
    """List the tiles of rows that share blocks; how many there are."""
    rows, each = j.get(job, j.ROWS), _tile_tokens(j.get(job, j.GROUPS))
    tiles, placed = 0, 0
    for leader in range(rows):
        if j.item(job, j.LEADERS, leader) != leader:
            continue
        if j.item(job, j.STRIDES, leader) == 0:
            continue
        start = placed
        for row in range(leader, rows):
            if j.item(job, j.LEADERS, row) == leader:
                j.set_item(job, j.ORDER, placed, row)
                placed += 1
        for first in range(start, placed, each):
            _set_tile(job, tiles, leader, first, min(each, placed - first), 1)
            tiles += 1
    return tiles


@njit
def own_tiles(job, tiles):
    """List each row's own tiles after the first `tiles`; how many there are in all.

    The tiles of a row that see most come first, so that the last to run are short.
    """
    each = _tile_tokens(j.get(job, j.GROUPS))
    for row in range(j.get(job, j.ROWS)):
        start = j.item(job, j.CU_Q_LENS, row)
        tokens = j.item(job, j.CU_Q_LENS, row + 1) - start
        if j.item(job, j.KV_LENS, row) == 0:
            continue
        for first in range((tokens - 1) // each * each, -1, -each):
            _set_tile(job, tiles, row, first, min(each, tokens - first), 0)
            tiles += 1
    return tiles
