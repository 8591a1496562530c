"""Who owns which block: pure, shape-preserving functions over one pytree.

Owns addresses: the free stack, refcounts, block tables and what each handle names.
Never sees tokens, requests or KV contents. Nothing is checked here: the caller
guarantees room (`grow` never takes more than `num_free`), empty targets (`adopt` and
`publish` write columns and handles that are holes) and that an edit list names a target
once.
Axes: S slots, M columns, P blocks, H handles, R and K padded edit lists. Padding and
holes are the size of the axis, which scatters drop.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

I32 = jnp.int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockPool:
    """Ownership of P blocks.

    Attributes:
      free: stack of unowned ids, free[:num_free].
      num_free: its height.
      refs: owners of each block: table entries plus handles.
      table: physical block behind each column; P = hole.
      held: columns in use.
      cache: physical block behind each handle; P = hole.
    """

    free: jax.Array  # i32[P]
    num_free: jax.Array  # i32[]
    refs: jax.Array  # i32[P]
    table: jax.Array  # i32[S, M]
    held: jax.Array  # i32[S]
    cache: jax.Array  # i32[H]


def init(num_blocks: int, slots: int, columns: int, handles: int) -> BlockPool:
    """A pool in which every block is free."""
    return BlockPool(
        free=jnp.arange(num_blocks - 1, -1, -1, dtype=I32),
        num_free=jnp.array(num_blocks, I32),
        refs=jnp.zeros(num_blocks, I32),
        table=jnp.full((slots, columns), num_blocks, I32),
        held=jnp.zeros(slots, I32),
        cache=jnp.full(handles, num_blocks, I32),
    )


def grow(pool: BlockPool, want: jax.Array, *, max_new: int) -> BlockPool:
    """Give slot s `want[s]` columns in all, at most `max_new` (static) new ones each.

    The free list is laid out raggedly over the slots in one gather and one scatter,
    with no loop (as in google-deepmind/simply's ragged page allocation).

    Args:
      want: i32[S]; a slot that holds as many or more is left alone.
    """
    s, m = pool.table.shape
    p = pool.refs.shape[0]
    need = jnp.maximum(want - pool.held, 0)  # [S]
    start = jnp.cumsum(need, dtype=I32) - need
    j = jnp.arange(max_new, dtype=I32)[None, :]
    live = j < need[:, None]  # [S, max_new]
    top = pool.num_free - 1 - (start[:, None] + j)
    block = jnp.where(live, pool.free.at[top].get(mode="fill", fill_value=p), p)
    column = jnp.where(live, pool.held[:, None] + j, m)
    row = jnp.arange(s, dtype=I32)[:, None]
    return dataclasses.replace(
        pool,
        num_free=pool.num_free - need.sum(dtype=I32),
        refs=pool.refs.at[block].add(1, mode="drop"),
        table=pool.table.at[row, column].set(block, mode="drop"),
        held=pool.held + need,
    )


def _disown(pool: BlockPool, blocks: jax.Array) -> BlockPool:
    """Take one owner from each id of `blocks`, i32[...]; push what nobody owns now.

    The push is in order of `blocks`: a block that several entries leave at once is
    pushed by the last of them only.
    """
    p = pool.refs.shape[0]
    blocks = blocks.reshape(-1)
    refs = pool.refs.at[blocks].add(-1, mode="drop")
    entry = jnp.arange(blocks.shape[0], dtype=I32)
    last = jnp.full(p, -1, I32).at[blocks].max(entry, mode="drop")
    unowned = refs.at[blocks].get(mode="fill", fill_value=1) == 0
    freed = unowned & (last.at[blocks].get(mode="fill", fill_value=-1) == entry)
    rank = jnp.cumsum(freed, dtype=I32) - 1
    target = jnp.where(freed, pool.num_free + rank, p)
    return dataclasses.replace(
        pool,
        refs=refs,
        free=pool.free.at[target].set(blocks, mode="drop"),
        num_free=pool.num_free + freed.sum(dtype=I32),
    )


def release(pool: BlockPool, slots: jax.Array) -> BlockPool:
    """Empty the slots of i32[R]; padding: S. Their columns become holes."""
    p = pool.refs.shape[0]
    blocks = pool.table.at[slots].get(mode="fill", fill_value=p)  # [R, M], holes = P
    pool = _disown(pool, blocks)
    return dataclasses.replace(
        pool,
        table=pool.table.at[slots].set(p, mode="drop"),
        held=pool.held.at[slots].set(0, mode="drop"),
    )


def adopt(pool: BlockPool, edits: jax.Array) -> BlockPool:
    """table[slot, column] := cache[handle] for i32[K, 3] edits; padding: (S, M, H)."""
    p = pool.refs.shape[0]
    slot, column, handle = edits.T
    block = pool.cache.at[handle].get(mode="fill", fill_value=p)
    return dataclasses.replace(
        pool,
        refs=pool.refs.at[block].add(1, mode="drop"),
        table=pool.table.at[slot, column].set(block, mode="drop"),
        held=pool.held.at[slot].max(column + 1, mode="drop"),
    )


def publish(pool: BlockPool, edits: jax.Array) -> BlockPool:
    """cache[handle] := table[slot, column] for i32[K, 3] edits; padding: (S, M, H)."""
    p = pool.refs.shape[0]
    slot, column, handle = edits.T
    block = pool.table.at[slot, column].get(mode="fill", fill_value=p)
    return dataclasses.replace(
        pool,
        refs=pool.refs.at[block].add(1, mode="drop"),
        cache=pool.cache.at[handle].set(block, mode="drop"),
    )


def retire(pool: BlockPool, handles: jax.Array) -> BlockPool:
    """Forget the handles of i32[K]; padding: H. What nobody else owns is freed."""
    p = pool.refs.shape[0]
    pool = _disown(pool, pool.cache.at[handles].get(mode="fill", fill_value=p))
    return dataclasses.replace(pool, cache=pool.cache.at[handles].set(p, mode="drop"))


def check(pool: BlockPool) -> None:
    """Raise AssertionError with the equation that fails; host side, for tests.

    Refcounts must equal owners, the free stack the unowned ids, and each slot's held
    columns must be its only non-holes.
    """
    free, num_free, refs, table, held, cache = (
        np.asarray(x)
        for x in (
            pool.free,
            pool.num_free,
            pool.refs,
            pool.table,
            pool.held,
            pool.cache,
        )
    )
    p, m = refs.shape[0], table.shape[1]
    used = np.arange(m)[None, :] < held[:, None]
    assert ((table < p) == used).all(), f"{table=} has holes where {held=} says none"
    owners = np.bincount(table[used], minlength=p + 1)[:p]
    owners += np.bincount(cache[cache < p], minlength=p)
    assert (owners == refs).all(), f"owners {owners} != refs {refs}"
    stack = sorted(free[:num_free].tolist())
    unowned = np.flatnonzero(refs == 0).tolist()
    assert stack == unowned, f"free stack {stack} != unowned blocks {unowned}"
