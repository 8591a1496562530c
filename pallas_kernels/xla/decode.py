"""Decode rows: one query each. What many rows share first, then each row's own KV."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.xla import walk
from pallas_kernels.xla.shared import attend_shared

_LANES = 16  # rows that step together: a step's fixed cost is 15 microseconds


def attend_decode(
    queries: jax.Array,  # [R, Hkv, G, D]
    pool: jax.Array,  # [NP, B, Hkv, 2D]
    table: jax.Array,  # i32[R, M]
    kv_lens: jax.Array,  # i32[R]; 0 = nothing to do
    window: int | jax.Array | None,
    soft_cap: float | None,
) -> jax.Array:  # f32[R, Hkv, G, D]; zero where there was nothing to do
    """Lanes walk row after row; a row's KV is walked by one lane, in order."""
    rows, _, _, head_size = queries.shape
    size = walk.positions_per_step(pool)
    # What a window cuts off is not shared: a row that it cuts walks alone.
    whole = kv_lens if window is None else jnp.where(kv_lens <= window, kv_lens, 0)
    skip, state = attend_shared(queries, pool, table, whole, soft_cap)
    if window is not None:
        skip = jnp.maximum(skip, (kv_lens - window) // size)
    steps = -(-kv_lens // size) - skip  # i32[R]
    lanes = min(walk.max_lanes(pool, _LANES), max(1, rows // 2))

    # Longest rows first, dealt to and fro: each lane gets about the same work.
    order = jnp.argsort(-steps)
    order = jnp.pad(order, (0, -rows % lanes), constant_values=rows)  # rows = none
    deals = order.reshape(-1, lanes)
    fro = (jnp.arange(len(deals)) % 2 == 1)[:, None]
    # Not deals.at[1::2].set(deals[1::2, ::-1]): XLA on a CPU then reads what it wrote.
    deals = jnp.where(fro, deals[:, ::-1], deals)
    ends = jnp.cumsum(walk.take(steps, deals), axis=0)  # i32[deals, lanes]

    # A zero query for the value half of each KV row costs less than cutting the row up.
    half = ((0, 0), (0, 0), (0, 0))
    queries = jnp.pad(queries, (*half, (0, head_size)))
    state = state._replace(values=jnp.pad(state.values, (*half, (head_size, 0))))

    def step(i, state):
        deal = jnp.sum(ends <= i, axis=0)  # i32[lanes]; len(deals) = the lane is done
        row = deals.at[deal, jnp.arange(lanes)].get(mode="fill", fill_value=rows)
        start = jnp.max(jnp.where(ends <= i, ends, 0), axis=0)  # i at the row's first
        at = walk.take(skip, row) + i - start
        kv_len = walk.take(kv_lens, row)
        kv, valid = walk.load(pool, table, row, at, kv_len)
        if window is not None:
            position = at[:, None] * size + jnp.arange(size)[None, :]
            valid &= position >= kv_len[:, None] - window
        old = walk.Softmax(*(walk.take(x, row) for x in state))
        x = walk.take(queries, row)
        new = walk.update(old, x, kv, kv, valid[:, None, None, :], soft_cap)
        return walk.Softmax(
            *(x.at[row].set(y, mode="drop") for x, y in zip(state, new, strict=True))
        )

    state = lax.fori_loop(0, jnp.max(ends[-1]), step, state)
    return walk.finish(state)[..., head_size:]
