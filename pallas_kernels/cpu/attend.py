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

from pallas_kernels.cpu import job as j
from pallas_kernels.cpu import vector as vec
from pallas_kernels.cpu.job import STRIDE
from pallas_kernels.cpu.kinds import element, put
from pallas_kernels.cpu.kv import fetch, locate, locate_next, pack_keys, pack_values
from pallas_kernels.cpu.tile import (
    configure,
    product,
    release,
    rows_at_once,
    whole_rows,
)

_MASKED = np.float32(-1e30)  # finite, so that nothing seen yet does not yield NaN
_LOG2_E = np.float32(np.log2(np.e))


@njit(inline="always")
def _scaled(scores, i, first, stop, scale):
    """A vector of scores, scaled; masked outside [first, stop)."""
    x = vec.mul(vec.load(scores + 64 * i), vec.fill(scale))
    if first > 16 * i or stop < 16 * i + 16:
        x = vec.outside(x, first - 16 * i, stop - 16 * i, _MASKED)
    return x


@njit(inline="always")
def _weigh(kind, x, i, shift, weights):
    """Store a vector of weights, and return it."""
    x = vec.exp2(vec.sub(x, shift))
    put(kind, weights + 16 * element(kind) * i, x)
    return x


@njit
def _softmax(kind, scores, weights, sums, norms, head, first, stop, scale, vectors):
    """Turn a query's scores into weights, and rescale what it has summed up.

    Args:
      norms: address of the largest score so far and the sum of weights.
      scale: of the scores; a weight is 2 to the power of what comes out.
      first, stop: the positions of this stride that the query sees.
      vectors: of scores, 2 or 4: written out, for they stay in registers so.
    """
    old = vec.load_f32(norms)
    a = _scaled(scores, 0, first, stop, scale)
    b = _scaled(scores, 1, first, stop, scale)
    best = vec.larger(vec.fill(old), vec.larger(a, b))
    c, d = a, b
    if vectors == 4:
        c = _scaled(scores, 2, first, stop, scale)
        d = _scaled(scores, 3, first, stop, scale)
        best = vec.larger(best, vec.larger(c, d))
    top = vec.largest(best)
    shift = vec.fill(top)
    total = vec.add(
        _weigh(kind, a, 0, shift, weights), _weigh(kind, b, 1, shift, weights)
    )
    if vectors == 4:
        c = _weigh(kind, c, 2, shift, weights)
        d = _weigh(kind, d, 3, shift, weights)
        total = vec.add(total, vec.add(c, d))
    norm = vec.load_f32(norms + 4)
    if top != old:
        decay = vec.exp2(vec.fill(old - top))
        for at in range(0, 4 * head, 64):
            vec.store(sums + at, vec.mul(vec.load(sums + at), decay))
        vec.store_f32(norms, top)
        norm = norm * vec.first(decay)
    vec.store_f32(norms + 4, norm + vec.total(total))


@njit
def _round_up(x, to):
    return (x + to - 1) // to * to


@njit
def _scratch_bytes(kind, head, tokens, queries, rows, heads):
    """Bytes that a tile works in."""
    size = element(kind)
    row = _round_up(head * size, 64)
    return (
        queries * (row + head * 4 + 8)
        + rows * STRIDE * (size + 4)
        + STRIDE * (2 * row + 16)
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
    scale = vec.load_f32(job + 8 * j.SCALE) * _LOG2_E
    each = count * groups  # queries of a head
    whole = whole_rows(kind, each)
    most = min(whole, rows_at_once(kind))
    queries = whole * heads
    row_size = features * size
    query_size = _round_up(row_size, 64)
    span = heads * 2 * row_size  # these heads' bytes of a position

    memory = np.empty(
        _scratch_bytes(kind, features, count, queries, most, heads), np.uint8
    )
    q = _round_up(memory.ctypes.data, 64)
    scores = _round_up(q + queries * query_size, 64)
    weights = _round_up(scores + most * STRIDE * 4, 64)
    sums = _round_up(weights + most * STRIDE * size, 64)
    norms = _round_up(sums + queries * features * 4, 64)
    keys = _round_up(norms + queries * 8, 64)
    values = _round_up(keys + STRIDE * query_size, 64)
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
    for h in range(heads):
        for i in range(each):
            at = h * whole + i
            query = (head + h) * groups + i % groups
            token = vec.load_i64(tokens + 8 * (i // groups))
            place = (token * kv_heads * groups + query) * row_size
            for d in range(0, row_size, 32):
                vec.copy32(q + at * query_size + d, j.get(job, j.Q) + place + d)
            for d in range(row_size, query_size, 32):
                vec.clear32(q + at * query_size + d)
            mine, norm = sums + at * 4 * features, norms + 8 * at
            if done > 0:
                _move(_state(job, row, query), mine, norm, features, 0)
            else:
                for d in range(0, 4 * features, 64):
                    vec.store(mine + d, vec.fill(np.float32(0)))
                vec.store_f32(norm, _MASKED)
                vec.store_f32(norm + 4, np.float32(0))

    locate(job, size, row, head, begin, end, zeros, addresses)
    configure(kind, most)
    for at in range(begin, end, STRIDE):
        # By 32 positions, so that a sum runs over the same chunks whoever sees more.
        vectors = _round_up(min(end - at, STRIDE), 32) // 16
        if at + STRIDE < end:
            locate(job, size, row, head, at + STRIDE, end, zeros, following)
        else:
            locate_next(job, size, number, head, zeros, following)
        # Shares in which what is read next is fetched. Few queries wait for memory, and
        # fetch while they multiply too.
        few = whole <= most
        steps = heads * (4 * vectors + (each + 2 if few else 0))
        step = 0
        for h in range(heads):
            mine, offset = h * whole, 2 * h * row_size
            for i in range(vectors):
                for half in range(2):
                    pack_keys(
                        addresses + 128 * i, offset, row_size, half, keys + 64 * i
                    )
                    fetch(following, span, step, steps)
                    step += 1
            for i in range(2 * vectors):
                pack_values(
                    kind,
                    addresses + 64 * i,
                    offset + row_size,
                    values + 8 * i * row_size,
                    features,
                    8,
                )
                fetch(following, span, step, steps)
                step += 1
            # Few queries at a time, so that what they work on stays in cache.
            for some in range(0, whole, most):
                rows = min(most, whole - some)
                at_q, at_sums = mine + some, sums + (mine + some) * 4 * features
                product(
                    kind,
                    rows,
                    16 * vectors,
                    0,
                    q + at_q * query_size,
                    query_size,
                    keys,
                    4 * STRIDE,
                    query_size // 4,
                    scores,
                    4 * STRIDE,
                )
                if few:
                    fetch(following, span, step, steps)
                    step += 1
                for i in range(min(rows, each - some)):
                    stop = vec.load_i64(stops + 8 * ((some + i) // groups))
                    _softmax(
                        kind,
                        scores + i * 4 * STRIDE,
                        weights + i * size * STRIDE,
                        at_sums + i * 4 * features,
                        norms + 8 * (at_q + i),
                        features,
                        stop - window - at,
                        stop - at,
                        scale,
                        vectors,
                    )
                    if few:
                        fetch(following, span, step, steps)
                        step += 1
                product(
                    kind,
                    rows,
                    features,
                    1,
                    weights,
                    size * STRIDE,
                    values,
                    4 * features,
                    4 * size * vectors,
                    at_sums,
                    4 * features,
                )
                if few:
                    fetch(following, span, step, steps)
                    step += 1
        addresses, following = following, addresses
    release(kind)

    for h in range(heads):
        for i in range(each):
            query = (head + h) * groups + i % groups
            nth = i // groups
            at = h * whole + i
            mine, norm = sums + at * 4 * features, norms + 8 * at
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
