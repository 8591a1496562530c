"""One step of online softmax over paged KV, for several lanes at once.

Owns how KV rows are read and how they are taken into account. Never sees which lane
stands for which rows or queries.

Axes: n lanes, Q queries for each KV head, S positions a step, E features.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Measured on a CPU with AVX512 (9 query heads, 3 KV heads of 64, contexts 64 to 600).
_POSITIONS = 128  # that one step reads for a lane
_STEP_ELEMENTS = 1 << 20  # of K and V that one step copies: they should stay cached
_MASKED = -1e30  # finite: a query that has seen nothing yet must not yield NaN


class Softmax(NamedTuple):
    """Attention over the positions seen so far."""

    values: jax.Array  # f32[n, Hkv, Q, E] weighted sum of value rows
    top: jax.Array  # f32[n, Hkv, Q] largest logit
    total: jax.Array  # f32[n, Hkv, Q] sum of the weights exp(logit - top)


def positions_per_step(pool: jax.Array) -> int:
    """S for a pool [NP, B, Hkv, 2D]: whole pages, about `_POSITIONS`."""
    block = pool.shape[1]
    return block * max(1, _POSITIONS // block)


def max_lanes(pool: jax.Array, most: int) -> int:
    """How many lanes may step together, `most` at the utmost."""
    _, _, kv_heads, width = pool.shape
    lane_elements = positions_per_step(pool) * kv_heads * width
    return max(1, min(most, _STEP_ELEMENTS // lane_elements))


def empty(n: int, kv_heads: int, queries: int, width: int) -> Softmax:
    """The state of lanes that have seen nothing."""
    shape = (n, kv_heads, queries)
    return Softmax(
        jnp.zeros((*shape, width), jnp.float32),
        jnp.full(shape, _MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
    )


def load(
    pool: jax.Array,  # [NP, B, Hkv, 2D]
    table: jax.Array,  # i32[R, M]
    row: jax.Array,  # i32[n]
    step: jax.Array,  # i32[n] positions [step * S, step * S + S) of the row
    kv_len: jax.Array,  # i32[n]
) -> tuple[jax.Array, jax.Array]:  # [n, Hkv, S, 2D], bool[n, S]
    """KV rows by head, and which lie before kv_len; the others are zero, not NaN."""
    _, block, kv_heads, width = pool.shape
    size = positions_per_step(pool)
    columns = step[:, None] * (size // block) + jnp.arange(size // block)[None, :]
    # Past the end, column 0 once more: it is in the cache, and a valid page.
    columns = jnp.where(columns * block < kv_len[:, None], columns, 0)
    page = table.at[row[:, None], columns].get(mode="clip")
    head = jnp.arange(kv_heads)[None, :, None]
    kv = pool.at[page[:, None, :], :, head].get(mode="clip")  # [n, Hkv, columns, B, 2D]
    kv = kv.reshape(row.size, kv_heads, size, width)
    position = step[:, None] * size + jnp.arange(size)[None, :]
    valid = position < kv_len[:, None]
    kv = jnp.where(valid[:, None, :, None], kv, jnp.zeros((), pool.dtype))
    return lax.optimization_barrier(kv), valid  # one pass over the pool for K and V


def update(
    state: Softmax,
    queries: jax.Array,  # [n, Hkv, Q, E]
    keys: jax.Array,  # [n, Hkv, S, E]
    values: jax.Array,  # [n, Hkv, S, E]
    seen: jax.Array,  # bool[n, 1, Q or 1, S or 1]
    soft_cap: float | None,
) -> Softmax:
    """Take S more positions into account.

    A query that has seen some and sees none of these stays as it is, bit for bit.
    """
    if keys.dtype == jnp.float32 and queries.shape[2] <= 16:
        # XLA on a CPU reads the larger operand faster on the left; the barrier keeps
        # the transposition out of the product.
        logits = lax.optimization_barrier(_dot("nhse,nhqe->nhsq", keys, queries))
        logits = logits.swapaxes(2, 3)
    else:
        logits = _dot("nhqe,nhse->nhqs", queries, keys)
    if soft_cap is not None:
        logits = jnp.float32(soft_cap) * jnp.tanh(logits / jnp.float32(soft_cap))
    logits = jnp.where(seen, logits, jnp.float32(_MASKED))
    top = jnp.maximum(state.top, jnp.max(logits, axis=-1))
    weights = jnp.exp(logits - top[..., None])
    decay = jnp.exp(state.top - top)
    added = _dot("nhqs,nhse->nhqe", weights.astype(values.dtype), values)
    return Softmax(
        state.values * decay[..., None] + added,
        top,
        state.total * decay + jnp.sum(weights, axis=-1),
    )


def finish(state: Softmax) -> jax.Array:  # f32[n, Hkv, Q, E]
    """The weighted means; zero where no step was taken."""
    inverse = jnp.where(state.total > 0, 1 / state.total, jnp.float32(0))
    return state.values * inverse[..., None]


class Tiles(NamedTuple):
    """Runs of at most `size` members of a group. Tiles past the last have count 0."""

    group: jax.Array  # i32[tiles]
    first: jax.Array  # i32[tiles] member of the group
    count: jax.Array  # i32[tiles] members


def cut(members: jax.Array, size: int, most: int) -> tuple[Tiles, jax.Array]:
    """Cut groups of members[g] into tiles, group after group; and how many there are.

    `most` bounds the number of tiles; all must fit.
    """
    tiles = -(-members // size)
    ends = jnp.cumsum(tiles)
    tile = jnp.arange(most)
    group = jnp.sum(ends[None, :] <= tile[:, None], axis=1)
    first = (tile - take(ends - tiles, group)) * size
    count = jnp.clip(take(members, group) - first, 0, size)
    return Tiles(group, first, count), ends[-1]


def take(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[index], and zero where the index is past the end."""
    return x.at[index].get(mode="fill", fill_value=0)


def _dot(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Exact products, float32 sums, on every device."""
    return jnp.einsum(
        spec,
        x,
        y,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
