"""Attention of a few queries that read the same KV: one tile.

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

from pallas_kernels.cpu import job as j
from pallas_kernels.cpu import vector as vec
from pallas_kernels.cpu.job import STRIDE
from pallas_kernels.cpu.kinds import FLOATS, element, put
from pallas_kernels.cpu.tile import product

_MASKED = np.float32(-1e30)  # finite, so that nothing seen yet does not yield NaN


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
def _locate_next(job, size, number, head, zeros, addresses):
    """Addresses of what a tile that follows soon reads first, where heads go together.

    Two tiles on: the next one is probably another core's by now.
    """
    number += 2
    if j.get(job, j.PARTS) > 1 or number >= j.get(job, j.STOP_TILE):
        _locate(job, size, 0, head, 0, 0, zeros, addresses)
        return
    row = j.item(job, j.TILES, number * j.TILE_WORDS)
    stop = j.item(job, j.KV_LENS, row)
    start = max(0, stop - j.get(job, j.WINDOW)) // STRIDE * STRIDE
    start = max(start, j.item(job, j.STRIDES, row) * STRIDE)
    _locate(job, size, row, head, start, stop, zeros, addresses)


@njit
def _fetch(addresses, offset, span, step, steps):
    """Ask for one of `steps` equal shares of what lies at STRIDE addresses.

    Memory answers while the kernel computes, if it is not asked for all at once.
    """
    for i in range(STRIDE * step // steps, STRIDE * (step + 1) // steps):
        place = vec.load_i64(addresses + 8 * i) + offset
        for d in range(0, span, 64):
            vec.prefetch(place + d)


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
def _scratch_bytes(kind, head, tokens, queries, heads):
    """Bytes that a tile works in."""
    size = element(kind)
    return (
        queries * (head * (size + 4) + STRIDE * (size + 4) + 8)
        + STRIDE * (2 * size * _round_up(head, 32) + 16)
        + heads * 2 * head * size
        + tokens * 16
        + 64 * 12
    )


@njit
def attend(kind, job, number, part):
    """Do tile `number` of a job, or part `part` of its KV heads."""
    at = number * j.TILE_WORDS
    row, first = j.item(job, j.TILES, at), j.item(job, j.TILES, at + 1)
    count, shared = j.item(job, j.TILES, at + 2), j.item(job, j.TILES, at + 3)
    parts, kv_heads = j.get(job, j.PARTS), j.get(job, j.KV_HEADS)
    head = kv_heads * part // parts
    heads = kv_heads * (part + 1) // parts - head
    features, groups = j.get(job, j.HEAD), j.get(job, j.GROUPS)
    size, window = element(kind), j.get(job, j.WINDOW)
    scale = vec.load_f32(job + 8 * j.SCALE)
    each = count * groups  # queries of a head
    queries = each * heads
    row_size = features * size
    span = heads * 2 * row_size  # these heads' bytes of a position

    memory = np.empty(_scratch_bytes(kind, features, count, queries, heads), np.uint8)
    q = _round_up(memory.ctypes.data, 64)
    scores = _round_up(q + queries * row_size, 64)
    weights = _round_up(scores + each * STRIDE * 4, 64)
    sums = _round_up(weights + each * STRIDE * size, 64)
    norms = _round_up(sums + queries * features * 4, 64)
    keys = _round_up(norms + queries * 8, 64)
    values = _round_up(keys + STRIDE * _round_up(features, 32) * size, 64)
    addresses = _round_up(values + STRIDE * features * size, 64)
    following = addresses + STRIDE * 8
    zeros = following + STRIDE * 8
    tokens = _round_up(zeros + span, 64)  # where each token of the tile stands
    stops = tokens + count * 8  # how many positions of the tile each one sees

    begin, end = _tokens(job, row, first, count, shared, tokens, stops)
    done = 0 if shared else j.item(job, j.STRIDES, row)
    begin = max(begin, done * STRIDE)
    for d in range(0, span, 32):
        vec.clear32(zeros + d)
    for i in range(queries):
        query = (head + i // each) * groups + i % groups
        token = vec.load_i64(tokens + 8 * (i % each // groups))
        place = (token * kv_heads * groups + query) * row_size
        for d in range(0, row_size, 32):
            vec.copy32(q + i * row_size + d, j.get(job, j.Q) + place + d)
        mine, norm = sums + i * 4 * features, norms + 8 * i
        if done > 0:
            _move(_state(job, row, query), mine, norm, features, 0)
        else:
            for d in range(0, 4 * features, 64):
                vec.store(mine + d, vec.fill(np.float32(0)))
            vec.store_f32(norm, _MASKED)
            vec.store_f32(norm + 4, np.float32(0))

    _locate(job, size, row, head, begin, end, zeros, addresses)
    for at in range(begin, end, STRIDE):
        # By 32 positions, so that a sum runs over the same chunks whoever sees more.
        vectors = _round_up(min(end - at, STRIDE), 32) // 16
        if at + STRIDE < end:
            _locate(job, size, row, head, at + STRIDE, end, zeros, following)
        else:
            _locate_next(job, size, number, head, zeros, following)
        for h in range(heads):
            mine, offset = h * each, 2 * h * row_size
            # What is read next: this stride's next head, or the next stride.
            ahead = addresses if h + 1 < heads else following
            skip = offset + 2 * row_size if h + 1 < heads else 0
            for i in range(vectors):
                for w in range(0, row_size, 64):
                    vec.transpose(
                        addresses + 128 * i,
                        offset + w,
                        keys + w * STRIDE + 64 * i,
                        4 * STRIDE,
                    )
                _fetch(ahead, skip, 2 * row_size, i, 2 * vectors)
            for i in range(vectors):
                pack_values(
                    kind,
                    addresses + 128 * i,
                    offset + row_size,
                    values + 16 * i * row_size,
                    features,
                    16,
                )
                _fetch(ahead, skip, 2 * row_size, vectors + i, 2 * vectors)
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
                stop = vec.load_i64(stops + 8 * (i // groups))
                _softmax(
                    kind,
                    scores + i * 4 * STRIDE,
                    weights + i * size * STRIDE,
                    sums + (mine + i) * 4 * features,
                    norms + 8 * (mine + i),
                    features,
                    stop - window - at,
                    stop - at,
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
        addresses, following = following, addresses

    for i in range(queries):
        query = (head + i // each) * groups + i % groups
        nth = i % each // groups
        mine, norm = sums + i * 4 * features, norms + 8 * i
        if shared:
            owner = j.item(job, j.ORDER, first + nth)
            _move(_state(job, owner, query), mine, norm, features, 1)
            continue
        token = vec.load_i64(tokens + 8 * nth)
        place = (token * kv_heads * groups + query) * row_size
        inverse = vec.fill(np.float32(1) / vec.load_f32(norm + 4))
        for d in range(0, features, 16):
            x = vec.mul(vec.load(mine + 4 * d), inverse)
            put(kind, j.get(job, j.OUT) + place + d * size, x)
    return memory[0]  # keeps it alive until here


@njit
def _tokens(job, row, first, count, shared, tokens, stops):
    """Fill in where a tile's tokens stand and what they see; the strides to walk."""
    start = j.item(job, j.CU_Q_LENS, row)
    kv_len = j.item(job, j.KV_LENS, row)
    before = kv_len - (j.item(job, j.CU_Q_LENS, row + 1) - start)
    end = 0
    for i in range(count):
        if shared:
            member = j.item(job, j.ORDER, first + i)
            token = j.item(job, j.CU_Q_LENS, member)
            stop = j.item(job, j.STRIDES, member) * STRIDE
        else:
            token = start + first + i
            stop = before + first + i + 1
        vec.store_i64(tokens + 8 * i, token)
        vec.store_i64(stops + 8 * i, stop)
        end = max(end, stop)
    seen = 0 if shared else max(0, before + first + 1 - j.get(job, j.WINDOW))
    return seen // STRIDE * STRIDE, end


@njit
def _state(job, row, query):
    """Where a decode row's query keeps its sums between two tiles."""
    heads = j.get(job, j.KV_HEADS) * j.get(job, j.GROUPS)
    return j.get(job, j.STATE) + (row * heads + query) * (j.get(job, j.HEAD) + 2) * 4


@njit
def _move(state, sums, norms, features, store):
    """Store a query's sums in a state, or load them."""
    for d in range(0, 4 * features, 64):
        if store:
            vec.store(state + d, vec.load(sums + d))
        else:
            vec.store(sums + d, vec.load(state + d))
    state += 4 * features
    for i in (0, 4):
        if store:
            vec.store_f32(state + i, vec.load_f32(norms + i))
        else:
            vec.store_f32(norms + i, vec.load_f32(state + i))
