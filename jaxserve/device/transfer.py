"""KV blocks out of the engine state, and back into it: programs of their own.

Owns how blocks are gathered and scattered. Never sees a payload's name or the host's
memory. A launch donates its state, so spills are dispatched before it; they leave the
state alone. Axes as in state.py; E blocks of one call, a bucket; fold: pages a block
has in a group (the layers, where they are folded into pages).
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.config import EngineShape
from jaxserve.device import block_pool
from jaxserve.device.state import EngineState
from jaxserve.models.base import Model, Pages

I32 = jnp.int32


def _pages(block: jax.Array, pages: jax.Array, num_blocks: int) -> jax.Array:
    """Indices i32[E, fold] of the pages of blocks i32[E]; past the end if P or more."""
    layer = jnp.arange(pages.shape[0] // num_blocks, dtype=I32)[None, :] * num_blocks
    block = block[:, None]
    return jnp.where(block < num_blocks, layer + block, pages.shape[0])


def spill(state: EngineState, where: jax.Array) -> Pages:
    """Copies of blocks, [E, fold, B, ...] for each group of pages.

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


def restore(
    state: EngineState, order: jax.Array, payload: Pages
) -> tuple[EngineState, jax.Array]:
    """Give a slot new columns with these contents.

    Returns the state, and the free blocks i32[] as an array that no later launch
    donates: it is there when the copy is done.

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
    size = jax.tree.leaves(payload)[0].shape[0]
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
    state = dataclasses.replace(state, pool=pool, pages=pages, slots=slots)
    return state, pool.num_free


def fork(state: EngineState, order: jax.Array) -> tuple[EngineState, jax.Array]:
    """Give a slot a column of its own with what another slot's holds, or none.

    Args:
      state: donated by `compiled`.
      order: i32[6] slot, the other one, the column, whether it is copied, the slot's KV
        rows afterwards, and the token that it decodes next. The slot's columns before
        that one are there.
    """
    slot, source, column, copied, length, last = order
    p = state.pool.refs.shape[0]
    block = state.pool.table.at[source[None], column].get(mode="fill", fill_value=p)
    payload = {
        name: pages.at[_pages(block, pages, p)].get(mode="clip")
        for name, pages in state.pages.items()
    }
    where = jnp.stack([slot, column, copied, jnp.zeros_like(slot), length, last])
    return restore(state, where, payload)


class Programs(NamedTuple):
    """Of one model and shape: a program of each for every bucket of blocks, and one
    `fork`. Those that change the state donate it."""

    spill: Any
    restore: Any
    fork: Any


@lru_cache(maxsize=64)
def compiled(model: Model, shape: EngineShape) -> Programs:
    """The jitted functions of this module; engines of the same share them."""
    del model, shape
    return Programs(
        jax.jit(partial(spill)),
        jax.jit(partial(restore), donate_argnums=0),
        jax.jit(partial(fork), donate_argnums=0),
    )
