"""A tile's keys and values: where they lie, and laying them out for the inner loop.

Owns the walk over block tables. Never sees a query.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numba.extending import overload

from pallas_kernels.cpu import job as j
from pallas_kernels.cpu import vector as vec
from pallas_kernels.cpu.job import STRIDE
from pallas_kernels.cpu.kinds import FLOATS


def pack_values(kind, addresses, offset, out, head, count):
    """Lay the value rows of `count` positions out for `multiply`."""
    raise NotImplementedError


@overload(pack_values)
def _pack_values(kind, addresses, offset, out, head, count):
    def floats(kind, addresses, offset, out, head, count):
        for i in range(count):
            row = vec.load_i64(addresses + 8 * i) + offset
            for d in range(0, 4 * head, 64):
                vec.store(out + i * 4 * head + d, vec.load(row + d))

    def pairs(kind, addresses, offset, out, head, count):
        for i in range(0, count, 2):
            row = vec.load_i64(addresses + 8 * i) + offset
            other = vec.load_i64(addresses + 8 * i + 8) + offset
            for d in range(0, 2 * head, 32):
                vec.interleave(row + d, other + d, out + i * 2 * head + 2 * d)

    return floats if kind is FLOATS.numba_type else pairs


@njit
def locate(job, size, row, head, start, stop, zeros, addresses):
    """Addresses of the KV of positions [start, start + STRIDE); `zeros` past `stop`."""
    block = j.get(job, j.BLOCK)
    table = j.get(job, j.TABLE) + row * j.get(job, j.COLUMNS) * 4
    row_bytes = j.get(job, j.KV_HEADS) * 2 * j.get(job, j.HEAD) * size
    base = j.get(job, j.PAGES) + head * 2 * j.get(job, j.HEAD) * size
    column, offset = start // block, start % block
    at = 0
    end = min(stop - start, STRIDE)
    while at < end:
        page = base + vec.load_i32(table + 4 * column) * block * row_bytes
        here = min(block - offset, end - at)
        for i in range(here):
            vec.store_i64(addresses + 8 * (at + i), page + (offset + i) * row_bytes)
        at += here
        column += 1
        offset = 0
    while at < STRIDE:
        vec.store_i64(addresses + 8 * at, zeros)
        at += 1


@njit
def locate_next(job, size, number, head, zeros, addresses):
    """Addresses of what a tile that follows soon reads first, where heads go together.

    Two tiles on: the next one is probably another core's by now.
    """
    number += 2
    if j.get(job, j.PARTS) > 1 or number >= j.get(job, j.STOP_TILE):
        locate(job, size, 0, head, 0, 0, zeros, addresses)
        return
    row = j.item(job, j.TILES, number * j.TILE_WORDS)
    stop = j.item(job, j.KV_LENS, row)
    start = max(0, stop - j.get(job, j.WINDOW)) // STRIDE * STRIDE
    start = max(start, j.item(job, j.STRIDES, row) * STRIDE)
    locate(job, size, row, head, start, stop, zeros, addresses)


@njit
def fetch(addresses, span, step, steps):
    """Ask for one of `steps` equal shares of what lies at STRIDE addresses.

    Memory answers while the kernel computes, if it is not asked for all at once, and in
    the order in which it lies.
    """
    for i in range(STRIDE * step // steps, STRIDE * (step + 1) // steps):
        place = vec.load_i64(addresses + 8 * i)
        for d in range(0, span, 64):
            vec.prefetch(place + d)


@njit
def pack_keys(addresses, offset, size, half, out):
    """Lay half of the key rows, `size` bytes each, of 16 positions out for `multiply`.

    Steps of 64 bytes are whole: what a key lacks of its last one is zero.
    """
    whole = (size + 63) // 64 * 64
    middle = whole // 2 // 64 * 64
    start, stop = (middle, whole) if half else (0, middle)
    for w in range(start, min(stop, size), 64):
        vec.transpose(addresses, offset + w, out + w * STRIDE, 4 * STRIDE)
    for w in range(max(start, size), stop, 4):
        vec.store(out + w * STRIDE, vec.fill(np.float32(0)))
