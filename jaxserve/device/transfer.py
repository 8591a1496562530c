"""KV blocks out of the engine state, and back into it: programs of their own.

Owns how blocks are gathered and scattered. Never sees a payload's name or the host's
memory. A launch donates its state, so spills are dispatched before it; they leave the
state alone. Axes as in state.py; E blocks of one call, a bucket; fold: pages a block
has in a group (the layers, where they are folded into pages).
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache, partial

import jax
import jax.numpy as jnp

from jaxserve.config import EngineShape
from jaxserve.device import block_pool
from jaxserve.device.state import EngineState
from jaxserve.models.base import Model, Pages

I32 = jnp.int32


def _pages(block: jax.Array, pages: jax.Array, num_blocks: int) -> jax.Array:
    """Indices i32[fold, E] of the pages of blocks i32[E]; past the end if P or more."""
    fold = pages.shape[0] // num_blocks
    layer = jnp.arange(fold, dtype=I32)[:, None] * num_blocks
    return jnp.where(block < num_blocks, layer + block[None, :], pages.shape[0])


def spill(state: EngineState, where: jax.Array) -> Pages:
    """Copies of blocks, [fold, E, B, ...] for each group of pages.

    Args:
      where: i32[E, 3] slot and column, or S, M and a handle. Of padding, and of columns
        that hold no block, anything comes.
    """
    pool = state.pool
    p = pool.refs.shape[0]
    slot, column, handle = where.T
    block = jnp.minimum(
        pool.table.at[slot, column].get(mode="fill", fill_value=p),
        pool.cache.at[handle].get(mode="fill", fill_value=p),
    )
    return {
        name: pages.at[_pages(block, pages, p)].get(mode="clip")
        for name, pages in state.pages.items()
    }


def restore(state: EngineState, order: jax.Array, payload: Pages) -> EngineState:
    """Give a slot new columns with these contents.

    Args:
      state: donated by `compiled`.
      order: i32[6] slot, column of the payload's first block, how many blocks count,
        how many of these the slot has already and keeps, its KV rows afterwards, and
        the token that it decodes next. Its columns before those are there.
      payload: as from `spill`.
    """
    slot, first, count, skip, length, last = order
    s, m = state.pool.table.shape
    p = state.pool.refs.shape[0]
    size = jax.tree.leaves(payload)[0].shape[1]
    want = jnp.zeros(s, I32).at[slot].set(first + count, mode="drop")
    pool = block_pool.grow(state.pool, want, max_new=min(size, m))
    each = jnp.arange(size, dtype=I32)
    column = jnp.where((each >= skip) & (each < count), first + each, m)
    block = pool.table.at[slot, column].get(mode="fill", fill_value=p)
    pages = {
        name: pages.at[_pages(block, pages, p)].set(payload[name], mode="drop")
        for name, pages in state.pages.items()
    }
    slots = dataclasses.replace(
        state.slots,
        length=state.slots.length.at[slot].set(length, mode="drop"),
        last=state.slots.last.at[slot].set(last, mode="drop"),
    )
    return EngineState(pool=pool, pages=pages, slots=slots)


@lru_cache(maxsize=64)
def compiled(model: Model, shape: EngineShape):
    """The jitted (spill, restore) of an engine's model and shape: one program of each
    for every bucket of blocks. `restore` donates the state."""
    del model, shape  # engines of the same share their programs
    return jax.jit(partial(spill)), jax.jit(partial(restore), donate_argnums=0)
