"""The `xla` implementation: the shared suite, and that it never copies the pool."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pallas_kernels import paged_attention, write_kv
from tests.kernels.batches import Shape
from tests.kernels.cases import MANY, MIXED
from tests.kernels.suite import AttentionSuite

LAYERS = 3
BLOCKS = 50


class TestXla(AttentionSuite):
    implementation = "xla"


@pytest.mark.parametrize("shape", [MANY, MIXED], ids=["many rows", "mixed"])
def test_a_larger_pool_takes_no_more_temporary_memory(shape):
    attend = functools.partial(paged_attention, scale=0.1, implementation="xla")
    small, large = (
        jax.jit(attend).lower(*_abstract(shape, pages)).compile().memory_analysis()
        for pages in (BLOCKS, 10 * BLOCKS)
    )
    assert large.argument_size_in_bytes > 5 * small.argument_size_in_bytes
    assert small.temp_size_in_bytes == large.temp_size_in_bytes


@pytest.mark.parametrize("loop", ["scan", "fori"])
def test_layers_write_and_read_one_donated_pool(loop):
    """Written and read in place, layer after layer, however large the pool is."""
    small, large = (
        jax.jit(functools.partial(_layers, loop), donate_argnums=1)
        .lower(*_abstract(MIXED, LAYERS * blocks))
        .compile()
        .memory_analysis()
        for blocks in (BLOCKS, 10 * BLOCKS)
    )
    assert large.alias_size_in_bytes == 10 * small.alias_size_in_bytes > 0
    assert small.temp_size_in_bytes == large.temp_size_in_bytes
    assert large.temp_size_in_bytes < large.alias_size_in_bytes


def _layers(loop, q, pages, table, kv_lens, cu_q_lens, num_decode):
    """A model with nothing but caches: each layer's K and V are its queries."""
    num_blocks = pages.shape[0] // LAYERS
    tokens = jnp.arange(q.shape[0])

    def layer(carry, i):
        q, pages = carry
        k = q[:, :: q.shape[1] // pages.shape[2]]
        page_ids = jnp.where(tokens < cu_q_lens[-1], i * num_blocks, pages.shape[0])
        pages = write_kv(pages, k, k, page_ids, tokens % pages.shape[1])
        rows = (table + i * num_blocks, kv_lens, cu_q_lens, num_decode)
        q = paged_attention(q, pages, *rows, scale=0.1, implementation="xla")
        return (q, pages), None

    if loop == "scan":
        return lax.scan(layer, (q, pages), jnp.arange(LAYERS))[0]
    return lax.fori_loop(0, LAYERS, lambda i, c: layer(c, i)[0], (q, pages))


def _abstract(shape: Shape, num_pages: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The arguments of `paged_attention` without values."""
    heads = shape.kv_heads * shape.groups
    page = (shape.block, shape.kv_heads, 2, shape.head_size)
    i32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    return (
        jax.ShapeDtypeStruct((shape.tokens, heads, shape.head_size), shape.q_dtype),
        jax.ShapeDtypeStruct((num_pages, *page), shape.kv_dtype),
        i32((shape.rows, shape.columns)),
        i32((shape.rows,)),
        i32((shape.rows + 1,)),
        i32(()),
    )
