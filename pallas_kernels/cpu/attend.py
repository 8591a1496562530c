"""Attention of a few queries that read the KV of one row and head: one tile.

Owns the arithmetic: online softmax over blocks of STRIDE positions that start at
multiples of STRIDE (Milakov and Gimelshein, 2018; FlashAttention: Dao et al., 2022).
Each query's sums run over its positions in order, whatever the other queries of the
tile are, so a token's values are the same bits whether it was decoded or computed as
part of a prompt, in chunks of any size and with any batch mates. Never sees a batch.

A bf16 tile rounds queries and weights to bf16, and sums in float32.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numba.extending import overload

from pallas_kernels.cpu import vector as vec
from pallas_kernels.cpu.kinds import FLOATS, element, put
from pallas_kernels.cpu.tile import product

STRIDE = 64
"""Positions that one round of the softmax takes in."""

MAX_QUERIES = 48
"""Queries of a tile, save where one token alone has more."""

_MASKED = np.float32(-1e30)  # finite, so that nothing seen yet does not yield NaN
# Words of a job.
Q, OUT, PAGES, TABLE, KV_LENS, CU_Q_LENS, TILES, STATE = range(8)
ROWS, COLUMNS, BLOCK, KV_HEADS, GROUPS, HEAD, SCALE, WINDOW = range(8, 16)
TOKEN_BYTES = 16
PARTS = 17
JOB_WORDS = 18


@njit(inline="always")
def get(job, field):
    """A word of a job."""
    return vec.load_i64(job + 8 * field)


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
def _locate(job, size, row, head, start, stop, zeros, addresses):
    """Addresses of the KV of positions [start, start + STRIDE); `zeros` past `stop`."""
    block = get(job, BLOCK)
    table = get(job, TABLE) + row * get(job, COLUMNS) * 4
    row_bytes = get(job, KV_HEADS) * 2 * get(job, HEAD) * size
    base = get(job, PAGES) + head * 2 * get(job, HEAD) * size
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
def _ask(job, size, row, head, start, stop):
    """Prefetch the KV of positions [start, start + STRIDE), up to `stop`."""
    block = get(job, BLOCK)
    table = get(job, TABLE) + row * get(job, COLUMNS) * 4
    own = 2 * get(job, HEAD) * size
    row_bytes = get(job, KV_HEADS) * own
    base = get(job, PAGES) + head * own
    for at in range(start, min(stop, start + STRIDE)):
        page = base + vec.load_i32(table + 4 * (at // block)) * block * row_bytes
        place = page + at % block * row_bytes
        for i in range(0, own, 64):
            vec.prefetch(place + i)


@njit
def _softmax(kind, scores, weights, sums, norms, head, first, stop, scale, vectors):
    """Turn a query's scores into weights, and rescale what it has summed up.

    Args:
      norms: address of the largest score so far and the sum of weights.
      first, stop: the positions of this stride that the query sees.
    """
    top = vec.load_f32(norms)
    old = top
    best = vec.fill(top)
    factor = vec.fill(scale)
    for i in range(vectors):
        x = vec.mul(vec.load(scores + 64 * i), factor)
        if first > 16 * i or stop < 16 * i + 16:
            x = vec.outside(x, first - 16 * i, stop - 16 * i, _MASKED)
        vec.store(scores + 64 * i, x)
        best = vec.larger(best, x)
    top = vec.largest(best)
    shift = vec.fill(top)
    total = vec.fill(np.float32(0))
    for i in range(vectors):
        x = vec.exp(vec.sub(vec.load(scores + 64 * i), shift))
        put(kind, weights + 16 * element(kind) * i, x)
        total = vec.add(total, x)
    norm = vec.load_f32(norms + 4)
    if top != old:
        decay = vec.exp(vec.fill(old - top))
        for d in range(0, 4 * head, 64):
            vec.store(sums + d, vec.mul(vec.load(sums + d), decay))
        vec.store_f32(norms, top)
        norm = norm * vec.first(decay)
    vec.store_f32(norms + 4, norm + vec.total(total))


@njit
def _round_up(x, to):
    return (x + to - 1) // to * to


@njit
def scratch_bytes(kind, head, queries):
    """Bytes that a tile works in."""
    size = element(kind)
    return (
        queries * (head * (size + 4) + STRIDE * (size + 4) + 8)
        + STRIDE * (2 * size * _round_up(head, 32) + 16)
        + 2 * head * size
        + 64 * 9
    )


@njit
def attend(kind, job, row, first, count, head, stop_head):
    """Attention of tokens [first, first + count) of a row, for some of the KV heads.

    Args:
      job: address of the words named above.
      first: counted from the row's first token in this batch.
      head, stop_head: these heads, and the query heads that read them.
    """
    size = element(kind)
    features, groups = get(job, HEAD), get(job, GROUPS)
    start = vec.load_i32(get(job, CU_Q_LENS) + 4 * row)
    q_len = vec.load_i32(get(job, CU_Q_LENS) + 4 * row + 4) - start
    kv_len = vec.load_i32(get(job, KV_LENS) + 4 * row)
    window = get(job, WINDOW)
    scale = vec.load_f32(job + 8 * SCALE)
    each = count * groups  # queries of a head
    queries = each * (stop_head - head)
    row_size = features * size

    memory = np.empty(scratch_bytes(kind, features, queries), np.uint8)
    q = _round_up(memory.ctypes.data, 64)
    scores = _round_up(q + queries * row_size, 64)
    weights = _round_up(scores + each * STRIDE * 4, 64)
    sums = _round_up(weights + each * STRIDE * size, 64)
    norms = _round_up(sums + queries * features * 4, 64)
    keys = _round_up(norms + queries * 8, 64)
    values = _round_up(keys + STRIDE * _round_up(features, 32) * size, 64)
    addresses = _round_up(values + STRIDE * features * size, 64)
    soon = addresses + STRIDE * 8
    zeros = soon + STRIDE * 8

    # Query i of the tile: head by head, in a head token by token.
    stride = get(job, KV_HEADS) * groups * row_size
    source = get(job, Q) + (start + first) * stride
    for i in range(queries):
        query = head * groups + i // each * groups + i % groups
        token = i % each // groups
        for d in range(0, row_size, 32):
            vec.copy32(
                q + i * row_size + d, source + token * stride + query * row_size + d
            )
        for d in range(0, 4 * features, 64):
            vec.store(sums + i * 4 * features + d, vec.fill(np.float32(0)))
        vec.store_f32(norms + 8 * i, _MASKED)
        vec.store_f32(norms + 8 * i + 4, np.float32(0))
    for d in range(0, 2 * row_size, 32):
        vec.clear32(zeros + d)

    before = kv_len - q_len + first  # position of the tile's first token
    end = before + count
    begin = max(0, before + 1 - window) // STRIDE * STRIDE
    for at in range(begin, end, STRIDE):
        vectors = (min(end - at, STRIDE) + 15) // 16
        for h in range(head, stop_head):
            _locate(job, size, row, h, at, end, zeros, addresses)
            if h + 1 < stop_head:
                _locate(job, size, row, h + 1, at, end, zeros, soon)
            else:
                _locate(job, size, row, head, at + STRIDE, end, zeros, soon)
            mine = (h - head) * each
            for i in range(vectors):
                for w in range(0, row_size, 64):
                    vec.transpose(
                        addresses + 128 * i, w, keys + w * STRIDE + 64 * i, 4 * STRIDE
                    )
                for k in range(16):
                    place = vec.load_i64(soon + 128 * i + 8 * k)
                    for w in range(0, row_size, 64):
                        vec.prefetch(place + w)
            for i in range(vectors):
                for k in range(16):
                    place = vec.load_i64(soon + 128 * i + 8 * k) + row_size
                    for w in range(0, row_size, 64):
                        vec.prefetch(place + w)
                pack_values(kind, addresses+128*i, row_size, values+i*16*features*size, features, 16)
            product(
                kind,
                each,
                16 * vectors,
                0,
                q + mine * row_size,
                row_size,
                keys,
                4 * STRIDE,
                row_size // 4,
                scores,
                4 * STRIDE,
            )
            for i in range(each):
                position = before + i // groups
                _softmax(
                    kind,
                    scores + i * 4 * STRIDE,
                    weights + i * size * STRIDE,
                    sums + (mine + i) * 4 * features,
                    norms + 8 * (mine + i),
                    features,
                    position + 1 - window - at,
                    position + 1 - at,
                    scale,
                    vectors,
                )
            product(
                kind,
                each,
                features,
                1,
                weights,
                size * STRIDE,
                values,
                4 * features,
                4 * size * vectors,
                sums + mine * 4 * features,
                4 * features,
            )

    out = get(job, OUT) + (start + first) * stride
    for i in range(queries):
        query = head * groups + i // each * groups + i % groups
        place = out + i % each // groups * stride + query * row_size
        inverse = vec.fill(np.float32(1) / vec.load_f32(norms + 8 * i + 4))
        for d in range(0, features, 16):
            x = vec.load(sums + (i * features + d) * 4)
            put(kind, place + d * size, vec.mul(x, inverse))
    return memory[0]  # keeps it alive until here
