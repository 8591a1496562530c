"""Blocks that several decode rows share are read once, for all of these rows.

A prompt that many requests begin with, or many samples of one prompt, is most of what a
decode step reads. The rows' queries then make one tile, as those of a prompt chunk do
(cascade attention: Ye et al., 2024; Hydragen: Juravsky et al., 2024).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.xla import walk

_MIN_ROWS = 16  # in smaller batches, looking costs more than is found
_MIN_MEMBERS = 4  # fewer rows walk alone as fast
_TILE_ROWS = 16


class _Groups(NamedTuple):
    """Rows that begin with the same blocks, each group led by its first row."""

    members: jax.Array  # i32[R] rows in the group that row r leads; 0 = leads none
    start: jax.Array  # i32[R] where its members start in `order`
    order: jax.Array  # i32[R] rows, group after group
    steps: jax.Array  # i32[R] steps of the walk that row r takes with its group


def attend_shared(
    queries: jax.Array,  # [R, Hkv, G, D]
    pool: jax.Array,  # [NP, B, Hkv, 2D]
    table: jax.Array,  # i32[R, M]
    kv_lens: jax.Array,  # i32[R]
    soft_cap: float | None,
) -> tuple[jax.Array, walk.Softmax]:  # i32[R], [R, Hkv, G, ...]
    """How many steps of each row are done, and the state after them."""
    rows, kv_heads, queries_each, head_size = queries.shape
    state = walk.empty(rows, kv_heads, queries_each, head_size)
    if rows < _MIN_ROWS:
        return jnp.zeros(rows, jnp.int32), state
    groups = _find(pool, table, kv_lens)
    tiles, num_tiles = walk.cut(groups.members, _TILE_ROWS, rows // _MIN_MEMBERS)

    def walk_tile(i, state):
        lead, first, count = (walk.take(x, i) for x in tiles)
        nth = jnp.arange(_TILE_ROWS)
        row = walk.take(groups.order, groups.start[lead] + first + nth)
        row = jnp.where(nth < count, row, rows)
        steps = walk.take(groups.steps, row)
        x = walk.take(queries, row).swapaxes(0, 1)  # [Hkv, rows, G, D]
        x = x.reshape(1, kv_heads, _TILE_ROWS * queries_each, head_size)
        limit = jnp.repeat(steps, queries_each)[None, None, :, None]

        def step(j, tile):
            at = (lead[None], jnp.full(1, j), kv_lens[lead][None])
            kv, _ = walk.load(pool, table, *at)
            k, v = kv[..., :head_size], kv[..., head_size:]
            return walk.update(tile, x, k, v, j < limit, soft_cap)

        tile = walk.empty(1, kv_heads, _TILE_ROWS * queries_each, head_size)
        tile = lax.fori_loop(0, jnp.max(steps), step, tile)

        def put(x, y):
            shape = (kv_heads, _TILE_ROWS, queries_each, *x.shape[3:])
            return x.at[row].set(y.reshape(shape).swapaxes(0, 1), mode="drop")

        return walk.Softmax(*map(put, state, tile))

    return groups.steps, lax.fori_loop(0, num_tiles, walk_tile, state)


def _find(pool: jax.Array, table: jax.Array, kv_lens: jax.Array) -> _Groups:
    """Groups of at least `_MIN_MEMBERS` rows that share all pages of some steps."""
    rows, columns = table.shape
    positions = walk.positions_per_step(pool)
    per_step = positions // pool.shape[1]
    row = jnp.arange(rows)
    full = jnp.minimum(kv_lens // positions, columns // per_step)
    # The leader of a row is the first one with a full step that has its first page.
    first = table[:, 0]
    like = (first[:, None] == first[None, :]) & (full > 0)[None, :]
    leader = jnp.argmax(like, axis=1)
    same = (table == table[leader])[:, : columns // per_step * per_step]
    same = jnp.all(same.reshape(rows, -1, per_step), axis=2)
    steps = jnp.sum(jnp.cumprod(same.astype(jnp.int32), axis=1), axis=1)
    # No further than the leader's KV: what its table names after that is no promise.
    steps = jnp.minimum(steps, jnp.minimum(full, full[leader]))
    # bool[R, R]: does row i follow leader j, itself included?
    follows = (leader[:, None] == row[None, :]) & (steps > 0)[:, None]
    members = jnp.sum(follows, axis=0)
    members = jnp.where(members >= _MIN_MEMBERS, members, 0)
    steps = jnp.where(members[leader] > 0, steps, 0)
    # The leader is the same as itself to its end; it goes as far as another member.
    others = jnp.max(
        jnp.where(follows & (row[:, None] != row[None, :]), steps[:, None], 0), axis=0
    )
    steps = jnp.minimum(steps, others[leader])
    order = jnp.argsort(jnp.where(steps > 0, leader, rows))
    start = jnp.cumsum(members) - members
    return _Groups(members, start, order, steps)
