"""Prompt chunks: tiles of queries of one row share a pass over its KV."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.xla import walk

# Long chunks alone would gain 15 % from 64; chunks of 32 tokens would lose 70 %.
_QUERIES = 32  # of a tile
_LANES = 4  # tiles that walk together


def attend_chunks(
    out: jax.Array,  # f32[T, Hkv, G, D]
    queries: jax.Array,  # [T, Hkv, G, D]
    pool: jax.Array,  # [NP, B, Hkv, 2D]
    table: jax.Array,  # i32[R, M]
    kv_lens: jax.Array,  # i32[R]
    starts: jax.Array,  # i32[R] first token of each row
    q_lens: jax.Array,  # i32[R] tokens of each row; 0 = nothing to do
    window: int | jax.Array | None,
    soft_cap: float | None,
) -> jax.Array:  # out, with the tokens of these rows replaced
    """Causal attention; the last query of a row sees all its KV."""
    num_tokens, kv_heads, groups, head_size = queries.shape
    rows = table.shape[0]
    size = min(_QUERIES, num_tokens)
    lanes = min(walk.max_lanes(pool, _LANES), max(1, num_tokens // 128))
    head = jnp.arange(kv_heads)[None, :, None]

    tiles, num_tiles = walk.cut(q_lens, size, num_tokens // size + rows)
    before = walk.take(kv_lens - q_lens, tiles.group) + tiles.first
    ends = jnp.where(tiles.count > 0, before + tiles.count, 0)  # KV its last query sees
    tokens = walk.take(starts, tiles.group) + tiles.first
    # Tiles that walk together should be about equally long.
    order = jnp.argsort(-ends)
    order = jnp.pad(order, (0, -order.size % lanes), constant_values=order.size)

    def walk_tiles(i, out):
        pick = lax.dynamic_slice(order, (i * lanes,), (lanes,))
        row, first_token, count, end = (
            walk.take(x, pick) for x in (tiles.group, tokens, tiles.count, ends)
        )
        offset = jnp.arange(size)[None, :]
        token = first_token[:, None] + offset
        token = jnp.where(offset < count[:, None], token, num_tokens)[:, None, :]
        x = queries.at[token, head].get(mode="clip")
        x = x.reshape(lanes, kv_heads, size * groups, head_size)
        q_position = jnp.repeat((end - count)[:, None] + offset, groups, axis=1)

        def step(j, state):
            kv, _ = walk.load(pool, table, row, jnp.full(lanes, j), end)
            position = j * kv.shape[2] + jnp.arange(kv.shape[2])
            seen = position[None, None, :] <= q_position[:, :, None]
            if window is not None:
                seen &= position[None, None, :] > q_position[:, :, None] - window
            k, v = kv[..., :head_size], kv[..., head_size:]
            return walk.update(state, x, k, v, seen[:, None], soft_cap)

        per_step = walk.positions_per_step(pool)
        steps = -(-jnp.max(end) // per_step)
        begin = 0
        if window is not None:
            first_seen = jnp.where(count > 0, end - count + 1 - window, jnp.max(end))
            begin = jnp.maximum(jnp.min(first_seen), 0) // per_step
        state = walk.empty(lanes, kv_heads, size * groups, head_size)
        values = walk.finish(lax.fori_loop(begin, steps, step, state))
        values = values.reshape(lanes, kv_heads, size, groups, head_size)
        return out.at[token, head].set(values, mode="drop")

    return lax.fori_loop(0, -(-num_tiles // lanes), walk_tiles, out)
