"""NaN in CPU attention: it is passed on, and stays with the tokens it belongs to."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention, rotary_attention
from tests.kernels.batches import Shape, make_batch
from tests.kernels.marks import needs_cpu_kernels
from tests.kernels.rotary_batches import NOWHERE, make_kv_batch

pytestmark = needs_cpu_kernels
DTYPES = ["float32", "bfloat16"]
_attend = jax.jit(functools.partial(paged_attention, scale=0.125, implementation="cpu"))
_rotary = jax.jit(
    functools.partial(rotary_attention, scale=0.125, implementation="cpu")
)


def _batch(dtype):
    """Five decode rows, of which four share a stride, and two chunks; 4 tokens pad."""
    shape = Shape(40, 7, 9, 16, 2, 3, 64, dtype, dtype)
    return make_batch(
        shape,
        [1, 1, 1, 1, 1, 20, 11],
        [70, 64, 130, 0, 99, 84, 11],
        shared=[([0, 1, 2, 4], slice(4))],
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("token", [0, 1, 2, 4, 5, 17, 24, 35, 38])
def test_nan_in_a_query_stays_in_its_token(token, dtype):
    """In rows that share, in the middle of a chunk, at both ends, and in padding."""
    batch = _batch(dtype)
    clean = np.asarray(_attend(*batch), np.float32)
    batch = batch._replace(q=batch.q.copy())
    batch.q[token, 4] = np.nan  # the second KV head's second query
    out = np.array(_attend(*batch), np.float32)
    if token < batch.cu_q_lens[-1]:
        assert np.isnan(out[token, 4]).all()
    out[token, 4] = clean[token, 4]
    np.testing.assert_array_equal(out, clean)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", [2, 5])
def test_nan_in_keys_and_values_stays_in_its_row(row, dtype):
    """A decode row that shares blocks with others, and a chunk."""
    batch = make_kv_batch(_batch(dtype))
    clean, _ = _rotary(*batch)
    mine = slice(*batch.cu_q_lens[row : row + 2])
    batch = batch._replace(qkv=batch.qkv.copy())
    batch.qkv[mine.stop - 1, 6:] = np.nan
    out, pages = _rotary(*batch)
    out, clean = np.array(out, np.float32), np.asarray(clean, np.float32)
    assert np.isnan(out[mine.stop - 1]).all()
    at = batch.page_ids[mine.stop - 1], batch.offsets[mine.stop - 1]
    assert np.isnan(np.asarray(pages, np.float32)[at]).all()
    out[mine] = clean[mine]
    np.testing.assert_array_equal(out, clean)


# Quiet NaNs of either sign and with any payload, and one that signals.
@pytest.mark.parametrize(
    "bits",
    [0x7FC00000, 0xFFC00000, 0x7FC00001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001],
    ids=hex,
)
def test_any_nan_in_a_value_is_written_as_nan(bits):
    batch = make_kv_batch(_batch("bfloat16"))
    batch.qkv.view(np.uint32)[0, -1, 3] = bits
    _, pages = _rotary(*batch)
    assert batch.page_ids[0] < NOWHERE
    row = pages[batch.page_ids[0], batch.offsets[0], 1, 1]
    assert np.isnan(np.asarray(row, np.float32))[3]


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_infinite_value_reaches_who_sees_it(dtype):
    """Every weight is positive, so that a sum with one infinite value is infinite."""
    batch = _batch(dtype)
    page, offset = batch.table[4, 5], 2  # position 82 of 99
    pages = jnp.asarray(batch.pages).at[page, offset, 1, 1, 7].set(jnp.inf)
    clean = np.asarray(_attend(*batch), np.float32)
    out = np.array(_attend(*batch._replace(pages=pages)), np.float32)
    assert (out[4, 3:, 7] == np.inf).all()
    out[4, 3:, 7] = clean[4, 3:, 7]
    np.testing.assert_array_equal(out, clean)
