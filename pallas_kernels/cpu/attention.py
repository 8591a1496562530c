"""The attention calls: what a batch is cut into, and what of it each core does.

Owns the order of the operands, which `pallas_kernels.cpu` passes. A call may bring
rotary angles and KV addresses along: then the queries come with the batch's own keys
and values, are rotated first, and the KV is written before anybody attends.
"""

from __future__ import annotations

import functools

import numpy as np
from numba import njit

from pallas_kernels.cpu import attend as a
from pallas_kernels.cpu import ffi
from pallas_kernels.cpu import vector as vec
from pallas_kernels.cpu.kinds import Kind, element, put

# Operands, the later ones only where the call rotates and writes.
(
    _QUERIES,
    _PAGES,
    _TABLE,
    _KV_LENS,
    _CU_Q_LENS,
    _SCALE,
    _WINDOW,
    _CHECKED,
    _COS,
    _SIN,
    _PAGE_IDS,
    _OFFSETS,
) = range(12)
# Results, the later ones likewise.
_OUT, _TILES, _NEW_PAGES, _ROTATED = range(4)

TILE_WORDS = 3
"""int32 words of a tile: row, first token of the row's, and how many."""

_ROTATE_TOKENS = 4  # of one item


def tile_tokens(groups: int) -> int:
    """How many tokens of one row make a tile."""
    return max(1, a.MAX_QUERIES // groups)


_tile_tokens = njit(tile_tokens)


@njit
def _plan(job):
    """List the batch's tiles and return their number; zero rows without KV.

    The tiles of a row that see most come first, so that the last ones are short.
    """
    count, tiles = 0, a.get(job, a.TILES)
    each = _tile_tokens(a.get(job, a.GROUPS))
    for row in range(a.get(job, a.ROWS)):
        start = vec.load_i32(a.get(job, a.CU_Q_LENS) + 4 * row)
        tokens = vec.load_i32(a.get(job, a.CU_Q_LENS) + 4 * row + 4) - start
        if vec.load_i32(a.get(job, a.KV_LENS) + 4 * row) == 0:
            _clear(job, start, start + tokens)
            continue
        for first in range((tokens - 1) // each * each, -1, -each):
            tile = tiles + 4 * TILE_WORDS * count
            vec.store_i32(tile, row)
            vec.store_i32(tile + 4, first)
            vec.store_i32(tile + 8, min(each, tokens - first))
            count += 1
    return count


@njit
def _clear(job, first, stop):
    """Zero the output of some tokens."""
    size, out = a.get(job, a.TOKEN_BYTES), a.get(job, a.OUT)
    for at in range(out + first * size, out + stop * size, 32):
        vec.clear32(at)


@njit
def _attend(kind, job, item):
    """One tile, or one KV head of it."""
    heads, parts = a.get(job, a.KV_HEADS), a.get(job, a.PARTS)
    tile = a.get(job, a.TILES) + 4 * TILE_WORDS * (item // parts)
    part = item % parts
    a.attend(
        kind,
        job,
        vec.load_i32(tile),
        vec.load_i32(tile + 4),
        vec.load_i32(tile + 8),
        heads * part // parts,
        heads * (part + 1) // parts,
    )


@njit(inline="always")
def _turn(kind, source, out, cos, sin, head):
    """Rotate one head of one token; pair i is (x[i], x[i + D / 2])."""
    half = head // 2
    for i in range(0, half, 16):
        at = min(i, half - 16)  # the last ones again rather than past the end
        x, y = vec.load(source + 4 * at), vec.load(source + 4 * (at + half))
        c, s = vec.load(cos + 4 * at), vec.load(sin + 4 * at)
        left = vec.sub(vec.mul(x, c), vec.mul(y, s))
        right = vec.add(vec.mul(y, c), vec.mul(x, s))
        put(kind, out + at * element(kind), left)
        put(kind, out + (at + half) * element(kind), right)


@njit
def _rotate(kind, frame, item):
    """Rotate the queries and keys of some tokens, and write their keys and values."""
    qkv, pages = ffi.argument(frame, _QUERIES), ffi.argument(frame, _PAGES)
    tokens, heads, head = ffi.size(qkv, 0), ffi.size(qkv, 1), ffi.size(qkv, 2)
    block, kv_heads = ffi.size(pages, 1), ffi.size(pages, 2)
    queries = heads - 2 * kv_heads
    row_size = head * element(kind)
    first = item * _ROTATE_TOKENS
    for token in range(first, min(first + _ROTATE_TOKENS, tokens)):
        source = ffi.data(qkv) + token * heads * head * 4
        cos = ffi.data(ffi.argument(frame, _COS)) + token * head * 2
        sin = ffi.data(ffi.argument(frame, _SIN)) + token * head * 2
        out = ffi.data(ffi.result(frame, _ROTATED)) + token * queries * row_size
        for h in range(queries):
            _turn(kind, source + h * head * 4, out + h * row_size, cos, sin, head)
        page = vec.load_i32(ffi.data(ffi.argument(frame, _PAGE_IDS)) + 4 * token)
        if page >= ffi.size(pages, 0):
            continue
        offset = vec.load_i32(ffi.data(ffi.argument(frame, _OFFSETS)) + 4 * token)
        out = ffi.data(ffi.result(frame, _NEW_PAGES))
        out += (page * block + offset) * kv_heads * 2 * row_size
        for h in range(kv_heads):
            key = source + (queries + h) * head * 4
            value = key + kv_heads * head * 4
            _turn(kind, key, out + 2 * h * row_size, cos, sin, head)
            place = out + (2 * h + 1) * row_size
            for d in range(0, head, 16):
                put(kind, place + d * element(kind), vec.load(value + 4 * d))


@njit
def _run(kind, frame, attend, rotate):
    if ffi.is_query(frame):
        return 0
    queries, pages = ffi.argument(frame, _QUERIES), ffi.argument(frame, _PAGES)
    table = ffi.argument(frame, _TABLE)
    writes = ffi.num_arguments(frame) > _COS
    kv_heads, tokens = ffi.size(pages, 2), ffi.size(queries, 0)
    heads = ffi.size(queries, 1) - (2 * kv_heads if writes else 0)
    words = np.empty(a.JOB_WORDS, np.int64)
    job = words.ctypes.data
    words[a.Q] = ffi.data(ffi.result(frame, _ROTATED) if writes else queries)
    words[a.PAGES] = ffi.data(ffi.result(frame, _NEW_PAGES) if writes else pages)
    words[a.TABLE] = ffi.data(table)
    words[a.KV_LENS] = ffi.data(ffi.argument(frame, _KV_LENS))
    words[a.CU_Q_LENS] = ffi.data(ffi.argument(frame, _CU_Q_LENS))
    words[a.OUT] = ffi.data(ffi.result(frame, _OUT))
    words[a.TILES] = ffi.data(ffi.result(frame, _TILES))
    words[a.ROWS] = ffi.size(table, 0)
    words[a.COLUMNS] = ffi.size(table, 1)
    words[a.BLOCK] = ffi.size(pages, 1)
    words[a.KV_HEADS] = kv_heads
    words[a.HEAD] = ffi.size(pages, 4)
    words[a.GROUPS] = heads // kv_heads
    words[a.SCALE] = vec.load_i32(ffi.data(ffi.argument(frame, _SCALE)))
    words[a.WINDOW] = vec.load_i32(ffi.data(ffi.argument(frame, _WINDOW)))
    words[a.TOKEN_BYTES] = heads * words[a.HEAD] * element(kind)
    if writes:
        groups = (tokens + _ROTATE_TOKENS - 1) // _ROTATE_TOKENS
        ffi.loop(frame, rotate, frame, groups)
    tiles = _plan(job)
    last = vec.load_i32(words[a.CU_Q_LENS] + 4 * words[a.ROWS])
    _clear(job, last, tokens)
    # A row's heads lie side by side in memory: they are split only to go round.
    words[a.PARTS] = 1 if tokens <= words[a.ROWS] and tiles >= 8 else kv_heads
    ffi.loop(frame, attend, job, tiles * words[a.PARTS])
    return words[0] * 0  # the words live until here


@functools.cache
def target(kind: Kind) -> str:
    """The name of the FFI target for a kind; compiles it the first time."""
    version, name = ffi.version(), f"pallas_kernels_attention_{kind.name}"
    attend_name, rotate_name = f"{name}_attend", f"{name}_rotate"

    def attend(job, item):
        ffi.keep(version)
        _attend(kind, job, item)

    def rotate(frame, item):
        ffi.keep(version)
        _rotate(kind, frame, item)

    def handler(frame):
        ffi.keep(version)
        return _run(
            kind, frame, ffi.address_of(attend_name), ffi.address_of(rotate_name)
        )

    ffi.define(attend_name, ffi.compiled(ffi.BODY, attend))
    ffi.define(rotate_name, ffi.compiled(ffi.BODY, rotate))
    ffi.register(name, ffi.compiled(ffi.HANDLER, handler))
    return name
