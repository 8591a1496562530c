"""CPU's `rotary_attention`: the bits of cut chunks, and one pool for all layers."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels import rotary_attention
from tests.kernels.batches import Shape, make_batch
from tests.kernels.marks import needs_cpu_kernels
from tests.kernels.rotary_batches import NOWHERE, KvBatch, make_kv_batch

pytestmark = needs_cpu_kernels
LAYERS = 3
Q_LENS, KV_LENS = [1, 1, 1, 20, 9], [70, 1, 0, 84, 9]
_attend = jax.jit(
    functools.partial(rotary_attention, scale=0.125, implementation="cpu")
)


def _batch(q_lens, kv_lens, dtype="float32"):
    shape = Shape(40, 7, 9, 12, 2, 3, 64, dtype, dtype)
    return make_kv_batch(make_batch(shape, q_lens, kv_lens))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_chunk_may_be_cut_anywhere(dtype):
    """The same bits of outputs and pages, at once, in two parts, and by decode."""
    batch = _batch([30], [100], dtype)
    expected, expected_pages = _attend(*batch)
    for cuts in ([0, 11, 30], range(31)):
        pages, got = batch.pages, []
        for first, last in itertools.pairwise(cuts):
            part = _part(batch._replace(pages=pages), first, last)
            out, pages = _attend(*part)
            got.append(np.asarray(out, np.float32)[: last - first])
        np.testing.assert_array_equal(
            np.concatenate(got), np.asarray(expected, np.float32)[:30]
        )
        np.testing.assert_array_equal(
            np.asarray(pages, np.float32), np.asarray(expected_pages, np.float32)
        )


def _part(batch: KvBatch, first: int, last: int) -> KvBatch:
    """Tokens [first, last) of row 0, the only one."""
    count, length = last - first, batch.cu_q_lens[1]
    move = functools.partial(np.roll, shift=-first, axis=0)
    page_ids = move(batch.page_ids)
    page_ids[count:] = NOWHERE
    kv_lens = batch.kv_lens.copy()
    kv_lens[0] += last - length
    return batch._replace(
        qkv=move(batch.qkv),
        cos=move(batch.cos),
        sin=move(batch.sin),
        page_ids=page_ids,
        offsets=move(batch.offsets),
        kv_lens=kv_lens,
        cu_q_lens=np.minimum(batch.cu_q_lens, count),
        num_decode=np.int32(count == 1),
    )


def _layers(implementation, qkv, cos, sin, pages, page_ids, offsets, table, *rest):
    """A model with nothing but caches; each layer's keys and values are the last's."""
    num_blocks = pages.shape[0] // LAYERS

    def layer(carry, i):
        qkv, pages = carry
        ids = jnp.where(page_ids < num_blocks, page_ids + i * num_blocks, NOWHERE)
        out, pages = rotary_attention(
            qkv,
            cos,
            sin,
            pages,
            ids,
            offsets,
            table + i * num_blocks,
            *rest,
            scale=0.125,
            implementation=implementation,
        )
        heads = out.shape[1]
        out = jnp.concatenate([out.astype(jnp.float32), qkv[:, heads:]], axis=1)
        return (out, pages), None

    return lax.scan(layer, (qkv, pages), jnp.arange(LAYERS))[0]


def test_layers_write_and_read_one_donated_pool():
    """In place, layer after layer, however large the pool is."""
    batch = _batch(Q_LENS, KV_LENS)
    small, large = (
        jax.jit(functools.partial(_layers, "cpu"), donate_argnums=3)
        .lower(*batch._replace(pages=np.zeros((n, *batch.pages.shape[1:]), np.float32)))
        .compile()
        .memory_analysis()
        for n in (60, 600)
    )
    page_bytes = batch.pages[0].nbytes
    assert small.alias_size_in_bytes == 60 * page_bytes
    assert large.alias_size_in_bytes == 600 * page_bytes
    assert small.temp_size_in_bytes == large.temp_size_in_bytes
    assert large.temp_size_in_bytes < large.alias_size_in_bytes


def test_a_scan_over_layers_agrees_with_xla():
    batch = _batch(Q_LENS, KV_LENS)
    pages = np.nan_to_num(batch.pages)
    pages = np.concatenate([pages * np.float32(i + 1) for i in range(LAYERS)])
    batch = batch._replace(pages=pages)
    (out, pages), (expected, expected_pages) = (
        jax.jit(functools.partial(_layers, name))(*batch) for name in ("cpu", "xla")
    )
    used = batch.cu_q_lens[len(Q_LENS)]
    np.testing.assert_allclose(out[:used], expected[:used], rtol=0, atol=2e-5)
    np.testing.assert_allclose(pages, expected_pages, rtol=0, atol=2e-6)
