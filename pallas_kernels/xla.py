"""Attention over paged KV in plain XLA: the implementation that runs everywhere.

Online softmax over blocks of KV rows, read straight from the pool (Milakov and
Gimelshein, 2018; FlashAttention: Dao et al., 2022). Trip counts are data, so that the
program depends on the shapes alone, and temporary memory on T and R, never on the pool.

A row walks its own blocks in order, and a step past its end leaves it as it is, bit for
bit; so its values do not depend on the other rows of the batch.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Measured on a CPU with AVX512 (9 query heads, 3 KV heads of 64, contexts 64 to 600).
_KV_TOKENS = 128  # KV rows that one step reads for one lane
_Q_TOKENS = 32  # queries of a chunk that share one pass over the KV
_LANES = 16  # rows that decode together: a step's fixed cost is 15 microseconds
_CHUNK_LANES = 4
_STEP_ELEMENTS = 1 << 20  # of K and V that one step copies: they should stay cached
_MASKED = -1e30  # finite: a row that has seen nothing yet must not yield NaN


class _Softmax(NamedTuple):
    """Attention over the KV rows seen so far; n lanes, Q queries for each KV head."""

    values: jax.Array  # f32[n, Hkv, Q, E] weighted sum of value rows
    top: jax.Array  # f32[n, Hkv, Q] largest logit
    total: jax.Array  # f32[n, Hkv, Q] sum of the weights exp(logit - top)


class _Tiles(NamedTuple):
    """Runs of queries of one row."""

    row: jax.Array  # i32[tiles]
    token: jax.Array  # i32[tiles] the first query
    count: jax.Array  # i32[tiles] queries
    kv_len: jax.Array  # i32[tiles] KV rows that the last query sees


def paged_attention(
    q: jax.Array,  # [T, Hq, D]
    pages: jax.Array,  # [NP, B, Hkv, 2, D]
    table: jax.Array,  # i32[R, M]
    kv_lens: jax.Array,  # i32[R]
    cu_q_lens: jax.Array,  # i32[R + 1]
    num_decode: jax.Array | int,  # i32[]
    *,
    scale: float,
) -> jax.Array:  # [T, Hq, D]
    """See `pallas_kernels.api.paged_attention`."""
    num_tokens, query_heads, head_size = q.shape
    num_pages, block, kv_heads, _, _ = pages.shape
    rows = table.shape[0]
    # Query heads of one KV head side by side; K and V of one KV head as one row.
    queries = (q.astype(jnp.float32) * jnp.float32(scale)).astype(pages.dtype)
    queries = queries.reshape(num_tokens, kv_heads, -1, head_size)
    pool = pages.reshape(num_pages, block, kv_heads, 2 * head_size)
    is_decode = jnp.arange(rows) < num_decode

    # Token r of a decode row is row r; what is no decode row comes out zero.
    decoded = _decode(
        _resize(queries, rows), pool, table, jnp.where(is_decode, kv_lens, 0)
    )
    out = _resize(decoded, num_tokens)
    if not (isinstance(num_decode, int) and num_decode == rows):
        q_lens = jnp.where(is_decode, 0, jnp.diff(cu_q_lens))
        out = _chunks(out, queries, pool, table, kv_lens, cu_q_lens[:-1], q_lens)
    return out.reshape(num_tokens, query_heads, head_size).astype(q.dtype)


def _decode(
    queries: jax.Array,  # [R, Hkv, G, D]
    pool: jax.Array,  # [NP, B, Hkv, 2D]
    table: jax.Array,  # i32[R, M]
    kv_lens: jax.Array,  # i32[R]; 0 = nothing to do
) -> jax.Array:  # f32[R, Hkv, G, D]; zero where there was nothing to do
    """One query for each row. Lanes walk row after row, one KV block a step."""
    rows, kv_heads, groups, head_size = queries.shape
    kv_tokens = _kv_tokens(pool)
    num_blocks = -(-kv_lens // kv_tokens)
    lanes = min(_lanes(pool, _LANES), max(1, rows // 2))

    # Longest rows first, dealt to and fro: each lane gets about the same work.
    order = jnp.argsort(-num_blocks)
    order = jnp.pad(order, (0, -rows % lanes), constant_values=rows)  # rows = none
    deals = order.reshape(-1, lanes)
    fro = (jnp.arange(len(deals)) % 2 == 1)[:, None]
    deals = jnp.where(fro, deals[:, ::-1], deals)
    ends = jnp.cumsum(_take(num_blocks, deals), axis=0)  # i32[deals, lanes] in steps

    # A zero query for the value half of each KV row costs less than cutting the row up.
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, 0), (0, head_size)))

    def step(i, state):
        deal = jnp.sum(ends <= i, axis=0)  # i32[lanes]; len(deals) = the lane is done
        row = deals.at[deal, jnp.arange(lanes)].get(mode="fill", fill_value=rows)
        kv_len = _take(kv_lens, row)
        start = jnp.max(jnp.where(ends <= i, ends, 0), axis=0)  # the row's first step
        kv, seen = _load(pool, table, row, i - start, kv_len)
        old = _Softmax(*(_take(x, row) for x in state))
        new = _update(old, _take(queries, row), kv, kv, seen[:, None, None, :])
        return _Softmax(
            *(x.at[row].set(y, mode="drop") for x, y in zip(state, new, strict=True))
        )

    empty = _empty(rows, kv_heads, groups, 2 * head_size)
    state = lax.fori_loop(0, jnp.max(ends[-1]), step, empty)
    return _finish(state)[..., head_size:]


def _chunks(
    out: jax.Array,  # f32[T, Hkv, G, D]
    queries: jax.Array,  # [T, Hkv, G, D]
    pool: jax.Array,  # [NP, B, Hkv, 2D]
    table: jax.Array,  # i32[R, M]
    kv_lens: jax.Array,  # i32[R]
    starts: jax.Array,  # i32[R] first token of each row
    q_lens: jax.Array,  # i32[R] tokens of each row; 0 = nothing to do
) -> jax.Array:  # out, with the tokens of these rows replaced
    """Rows of many queries, cut into tiles of queries that share a pass over the KV."""
    num_tokens, kv_heads, groups, head_size = queries.shape
    rows = table.shape[0]
    kv_tokens = _kv_tokens(pool)
    size = min(_Q_TOKENS, num_tokens)
    lanes = min(_lanes(pool, _CHUNK_LANES), max(1, num_tokens // _KV_TOKENS))
    head = jnp.arange(kv_heads)[None, :, None]

    # Tile i is queries [first, last) of its row; the last of them sees kv_len KV rows.
    row_tiles = -(-q_lens // size)
    ends = jnp.cumsum(row_tiles)
    tile = jnp.arange(num_tokens // size + rows)  # at least as many as there can be
    row = jnp.sum(
        ends[None, :] <= tile[:, None], axis=1
    )  # rows = there is no such tile
    first = (tile - _take(ends - row_tiles, row)) * size
    last = jnp.minimum(first + size, _take(q_lens, row))
    kv_len = jnp.where(row < rows, _take(kv_lens - q_lens, row) + last, 0)
    tiles = _Tiles(row, _take(starts, row) + first, last - first, kv_len)
    # Tiles that walk together should be about equally long.
    order = jnp.argsort(-kv_len)
    order = jnp.pad(order, (0, -order.size % lanes), constant_values=order.size)

    def walk(group, out):
        pick = lax.dynamic_slice(order, (group * lanes,), (lanes,))
        row, token, count, kv_len = (_take(x, pick) for x in tiles)
        offset = jnp.arange(size)[None, :]
        tokens = jnp.where(offset < count[:, None], token[:, None] + offset, num_tokens)
        x = queries.at[tokens[:, None, :], head].get(mode="clip")
        x = x.reshape(lanes, kv_heads, size * groups, head_size)
        q_pos = jnp.repeat((kv_len - count)[:, None] + offset, groups, axis=1)

        def step(i, state):
            kv, _ = _load(pool, table, row, jnp.full(lanes, i), kv_len)
            kv_pos = i * kv_tokens + jnp.arange(kv_tokens)
            seen = kv_pos[None, None, :] <= q_pos[:, :, None]
            k, v = kv[..., :head_size], kv[..., head_size:]
            return _update(state, x, k, v, seen[:, None])

        steps = -(-jnp.max(kv_len) // kv_tokens)
        empty = _empty(lanes, kv_heads, size * groups, head_size)
        values = _finish(lax.fori_loop(0, steps, step, empty))
        values = values.reshape(lanes, kv_heads, size, groups, head_size)
        return out.at[tokens[:, None, :], head].set(values, mode="drop")

    return lax.fori_loop(0, -(-ends[-1] // lanes), walk, out)


def _load(
    pool: jax.Array,  # [NP, B, Hkv, 2D]
    table: jax.Array,  # i32[R, M]
    row: jax.Array,  # i32[n]
    at: jax.Array,  # i32[n] which run of _kv_tokens positions
    kv_len: jax.Array,  # i32[n]
) -> tuple[jax.Array, jax.Array]:  # [n, Hkv, kv_tokens, 2D], bool[n, kv_tokens]
    """A run of each lane's KV rows, by head; zeros past kv_len, whatever lies there."""
    _, block, kv_heads, width = pool.shape
    kv_tokens = _kv_tokens(pool)
    columns = jnp.arange(kv_tokens // block)[None, :]
    columns = columns + at[:, None] * (kv_tokens // block)
    # Past the end, column 0 once more: it is in the cache, and a valid page.
    columns = jnp.where(columns * block < kv_len[:, None], columns, 0)
    page = table.at[row[:, None], columns].get(mode="clip")
    head = jnp.arange(kv_heads)[None, :, None]
    kv = pool.at[page[:, None, :], :, head].get(mode="clip")  # [n, Hkv, columns, B, 2D]
    kv = kv.reshape(row.size, kv_heads, kv_tokens, width)
    position = at[:, None] * kv_tokens + jnp.arange(kv_tokens)[None, :]
    seen = position < kv_len[:, None]
    kv = jnp.where(seen[:, None, :, None], kv, jnp.zeros((), pool.dtype))
    return lax.optimization_barrier(kv), seen


def _update(
    state: _Softmax,
    queries: jax.Array,  # [n, Hkv, Q, E]
    keys: jax.Array,  # [n, Hkv, S, E]
    values: jax.Array,  # [n, Hkv, S, E]
    seen: jax.Array,  # bool[n, 1, Q or 1, S]
) -> _Softmax:
    """Take S more KV rows into account."""
    if keys.dtype == jnp.float32 and queries.shape[2] <= 16:
        # XLA on a CPU reads the larger operand faster on the left; the barrier keeps
        # the transposition out of the product.
        logits = lax.optimization_barrier(_dot("nhse,nhqe->nhsq", keys, queries))
        logits = logits.swapaxes(2, 3)
    else:
        logits = _dot("nhqe,nhse->nhqs", queries, keys)
    logits = jnp.where(seen, logits, jnp.float32(_MASKED))
    top = jnp.maximum(state.top, jnp.max(logits, axis=-1))
    weights = jnp.exp(logits - top[..., None])
    decay = jnp.exp(state.top - top)
    added = _dot("nhqs,nhse->nhqe", weights.astype(values.dtype), values)
    return _Softmax(
        state.values * decay[..., None] + added,
        top,
        state.total * decay + jnp.sum(weights, axis=-1),
    )


def _dot(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Exact products, float32 sums, on every device."""
    return jnp.einsum(
        spec,
        x,
        y,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _empty(n: int, kv_heads: int, queries: int, width: int) -> _Softmax:
    shape = (n, kv_heads, queries)
    return _Softmax(
        jnp.zeros((*shape, width), jnp.float32),
        jnp.full(shape, _MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
    )


def _finish(state: _Softmax) -> jax.Array:  # f32[n, Hkv, Q, E]
    """The weighted mean; zero where no KV row was seen."""
    inverse = jnp.where(state.total > 0, 1 / state.total, jnp.float32(0))
    return state.values * inverse[..., None]


def _resize(x: jax.Array, size: int) -> jax.Array:
    """x with its first axis cut, or filled up with zeros, to `size`."""
    return jnp.pad(x[:size], ((0, max(0, size - len(x))), *[(0, 0)] * (x.ndim - 1)))


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[index], and zero where the index is past the end."""
    return x.at[index].get(mode="fill", fill_value=0)


def _kv_tokens(pool: jax.Array) -> int:
    block = pool.shape[1]
    return block * max(1, _KV_TOKENS // block)


def _lanes(pool: jax.Array, most: int) -> int:
    _, _, kv_heads, width = pool.shape
    return max(1, min(most, _STEP_ELEMENTS // (_kv_tokens(pool) * kv_heads * width)))
