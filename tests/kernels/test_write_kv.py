"""`write_kv` against NumPy assignment."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import write_kv

PAGES, BLOCK, KV_HEADS, HEAD_SIZE = 5, 4, 2, 8


def _rows(count, seed=0):
    rng = np.random.default_rng(seed)
    shape = (count, KV_HEADS, HEAD_SIZE)
    return rng.standard_normal(shape, np.float32), rng.standard_normal(
        shape, np.float32
    )


def _pages(dtype=jnp.float32):
    shape = (PAGES, BLOCK, KV_HEADS, 2, HEAD_SIZE)
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape).astype(dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_go_to_their_page_and_offset(dtype):
    k, v = _rows(4)
    page_ids = np.array([4, 0, 2, 4], np.int32)
    offsets = np.array([3, 0, 1, 0], np.int32)
    expected = _pages(dtype)
    for t, (page, offset) in enumerate(zip(page_ids, offsets, strict=True)):
        expected[page, offset, :, 0] = k[t].astype(dtype)
        expected[page, offset, :, 1] = v[t].astype(dtype)
    actual = jax.jit(write_kv)(_pages(dtype), k, v, page_ids, offsets)
    assert actual.dtype == dtype
    np.testing.assert_array_equal(actual, expected)


def test_a_page_id_past_the_pool_writes_nothing():
    k, v = _rows(3)
    page_ids = np.array([PAGES, 2**31 - 1, 1], np.int32)
    offsets = np.array([BLOCK - 1, 0, 2], np.int32)
    expected = _pages()
    expected[1, 2] = np.stack([k[2], v[2]], axis=1)
    actual = jax.jit(write_kv)(_pages(), k, v, page_ids, offsets)
    np.testing.assert_array_equal(actual, expected)


def test_donated_pages_are_written_in_place():
    pages = jax.ShapeDtypeStruct(_pages().shape, jnp.float32)
    rows = jax.ShapeDtypeStruct((2, KV_HEADS, HEAD_SIZE), jnp.float32)
    index = jax.ShapeDtypeStruct((2,), jnp.int32)
    write = jax.jit(write_kv, donate_argnums=0)
    memory = write.lower(pages, rows, rows, index, index).compile().memory_analysis()
    assert memory.alias_size_in_bytes == _pages().nbytes
    assert memory.temp_size_in_bytes < _pages().nbytes // 2
