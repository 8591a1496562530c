"""The attention calls: what a batch is cut into, and what of it each core does.

Owns the order of the operands, which `pallas_kernels.cpu` passes. A call may bring
rotary angles and KV addresses along: then the queries come with the batch's own keys
and values, are rotated first, and the KV is written before anybody attends.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pallas_kernels.cpu import checks, compiling, ffi, plan
from pallas_kernels.cpu import job as j
from pallas_kernels.cpu import vector as vec
from pallas_kernels.cpu.attend import attend
from pallas_kernels.cpu.kinds import Kind, element, put
from pallas_kernels.cpu.loops import loop

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
_OUT, _TILES, _SHARED, _STATE, _NEW_PAGES, _ROTATED = range(6)

_ROTATE_TOKENS = 4  # of one item


@njit
def _attend(kind, job, item):
    """One tile, or one part of its heads."""
    parts = j.get(job, j.PARTS)
    attend(kind, job, j.get(job, j.FIRST_TILE) + item // parts, item % parts)


@njit
def _clear(job, size):
    """Zero the output of tokens that see nothing: idle rows' and padding."""
    rows, out = j.get(job, j.ROWS), j.get(job, j.OUT)
    for row in range(rows + 1):
        first = j.item(job, j.CU_Q_LENS, row)
        stop = first
        if row == rows:
            stop = j.get(job, j.TOKENS)
        elif j.item(job, j.KV_LENS, row) == 0:
            stop = j.item(job, j.CU_Q_LENS, row + 1)
        for at in range(out + first * size, out + stop * size, 32):
            vec.clear32(at)


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
    rows = ffi.size(ffi.argument(frame, _TABLE), 0)
    used = vec.load_i32(ffi.data(ffi.argument(frame, _CU_Q_LENS)) + 4 * rows)
    for token in range(first, min(first + _ROTATE_TOKENS, tokens)):
        page = vec.load_i32(ffi.data(ffi.argument(frame, _PAGE_IDS)) + 4 * token)
        writes = 0 <= page < ffi.size(pages, 0)
        if token >= used and not writes:
            continue
        source = ffi.data(qkv) + token * heads * head * 4
        cos = ffi.data(ffi.argument(frame, _COS)) + token * head * 2
        sin = ffi.data(ffi.argument(frame, _SIN)) + token * head * 2
        out = ffi.data(ffi.result(frame, _ROTATED)) + token * queries * row_size
        for h in range(queries):
            _turn(kind, source + h * head * 4, out + h * row_size, cos, sin, head)
        if not writes:
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
def _run(kind, frame, tile, rotate):
    if ffi.is_query(frame):
        return 0
    queries, pages = ffi.argument(frame, _QUERIES), ffi.argument(frame, _PAGES)
    table = ffi.argument(frame, _TABLE)
    writes = ffi.num_arguments(frame) > _COS
    kv_heads, tokens = ffi.size(pages, 2), ffi.size(queries, 0)
    heads = ffi.size(queries, 1) - (2 * kv_heads if writes else 0)
    words = np.empty(j.JOB_WORDS, np.int64)
    job = words.ctypes.data
    rows, head = ffi.size(table, 0), ffi.size(pages, 4)
    words[j.Q] = ffi.data(ffi.result(frame, _ROTATED) if writes else queries)
    words[j.PAGES] = ffi.data(ffi.result(frame, _NEW_PAGES) if writes else pages)
    words[j.TABLE] = ffi.data(table)
    words[j.KV_LENS] = ffi.data(ffi.argument(frame, _KV_LENS))
    words[j.CU_Q_LENS] = ffi.data(ffi.argument(frame, _CU_Q_LENS))
    words[j.OUT] = ffi.data(ffi.result(frame, _OUT))
    words[j.TILES] = ffi.data(ffi.result(frame, _TILES))
    words[j.LEADERS] = ffi.data(ffi.result(frame, _SHARED))
    words[j.STRIDES] = words[j.LEADERS] + 4 * rows
    words[j.ORDER] = words[j.STRIDES] + 4 * rows
    words[j.STATE] = ffi.data(ffi.result(frame, _STATE))
    words[j.ROWS] = rows
    words[j.TOKENS] = tokens
    words[j.COLUMNS] = ffi.size(table, 1)
    words[j.BLOCK] = ffi.size(pages, 1)
    words[j.KV_HEADS] = kv_heads
    words[j.HEAD] = head
    words[j.GROUPS] = heads // kv_heads
    words[j.SCALE] = vec.load_i32(ffi.data(ffi.argument(frame, _SCALE)))
    words[j.WINDOW] = vec.load_i32(ffi.data(ffi.argument(frame, _WINDOW)))
    if vec.load_i32(ffi.data(ffi.argument(frame, _CHECKED))) != 0:
        error = checks.check_rows(frame, job, ffi.size(pages, 0))
        if error == 0 and writes:
            error = checks.check_writes(
                frame,
                ffi.data(ffi.argument(frame, _PAGE_IDS)),
                ffi.data(ffi.argument(frame, _OFFSETS)),
                tokens,
                ffi.size(pages, 0),
                ffi.size(pages, 1),
            )
        if error != 0:
            return error
    if writes:
        groups = (tokens + _ROTATE_TOKENS - 1) // _ROTATE_TOKENS
        loop(frame, rotate, frame, groups)
    _clear(job, heads * head * element(kind))
    plan.find_shared(job)
    shared = plan.shared_tiles(job)
    tiles = plan.own_tiles(job, shared)
    words[j.FIRST_TILE], words[j.STOP_TILE], words[j.PARTS] = 0, shared, kv_heads
    loop(frame, tile, job, shared * kv_heads)
    # A row's heads lie side by side in memory: they are split only to go round.
    words[j.FIRST_TILE], words[j.STOP_TILE] = shared, tiles
    words[j.PARTS] = 1 if tokens <= rows and tiles - shared >= 8 else kv_heads
    loop(frame, tile, job, (tiles - shared) * words[j.PARTS])
    return words[0] * 0  # the words live until here


@compiling.once
def target(kind: Kind) -> str:
    """The name of the FFI target for a kind; compiles it the first time."""
    version, name = compiling.version(), f"pallas_kernels_attention_{kind.name}"
    tile_name, rotate_name = f"{name}_tile", f"{name}_rotate"

    def tile(job, item):
        compiling.keep(version)
        _attend(kind, job, item)

    def rotate(frame, item):
        compiling.keep(version)
        _rotate(kind, frame, item)

    def handler(frame):
        compiling.keep(version)
        return _run(
            kind,
            frame,
            compiling.address_of(tile_name),
            compiling.address_of(rotate_name),
        )

    compiling.define(tile_name, compiling.compiled(compiling.BODY, tile))
    compiling.define(rotate_name, compiling.compiled(compiling.BODY, rotate))
    compiling.register(name, compiling.compiled(compiling.HANDLER, handler))
    return name
