"""The bits that CPU attention promises: no token's value depends on its company."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention
from tests.kernels.batches import Batch, Shape, make_batch, part_of
from tests.kernels.marks import needs_cpu_kernels

pytestmark = needs_cpu_kernels
DTYPES = ["float32", "bfloat16"]
CHUNK = 150


@functools.cache
def _jitted(window):
    return jax.jit(
        functools.partial(
            paged_attention, scale=0.125, window=window, implementation="cpu"
        )
    )


def _attend(batch: Batch, window: int | None = None) -> np.ndarray:
    return np.asarray(_jitted(window)(*batch), np.float32)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "cuts",
    [[1, 2, 50, 51, 98, 149], [47, 96, 128], range(1, CHUNK)],
    ids=["oddly", "near tiles and strides", "to single tokens"],
)
def test_a_chunk_may_be_cut_anywhere(cuts, dtype, window):
    """It starts at position 77; a tile is 16 tokens here, a stride 64 positions."""
    shape = Shape(CHUNK, 2, 20, 12, 2, 3, 80, dtype, dtype)
    whole = make_batch(shape, [CHUNK], [77 + CHUNK])
    expected = _attend(whole, window)
    for first, last in itertools.pairwise([0, *cuts, CHUNK]):
        part, where = part_of(whole, 0, slice(first, last))
        np.testing.assert_array_equal(
            _attend(part, window)[where], expected[first:last]
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("q_lens", "kv_lens"),
    [
        ([1] * 12, [9, 203, 300, 17, 150, 64, 1, 65, 320, 128, 31, 40]),
        ([1, 1, 40, 3, 50], [320, 65, 200, 3, 75]),
    ],
    ids=["decode", "mixed"],
)
def test_a_row_may_have_any_mates_number_and_padding(q_lens, kv_lens, dtype):
    shape = Shape(sum(q_lens) + 1, 12, q_dtype=dtype, kv_dtype=dtype)
    batch = make_batch(shape, q_lens, kv_lens)
    together = _attend(batch)
    for row, start in enumerate(batch.cu_q_lens[: len(q_lens)]):
        for at, tokens, rows in [(0, q_lens[row], 1), (3, 70, 5), (8, 130, 20)]:
            alone, where = part_of(batch, row, at=at, tokens=tokens, rows=rows)
            np.testing.assert_array_equal(
                _attend(alone)[where], together[start : start + q_lens[row]]
            )


# Rows 0 and 27; five; twenty, of which some share more; and row 26 nothing. One more
# column of 16 positions than a whole number of strides changes nothing.
GROUPS = [
    ([0, 27], slice(20)),
    ([1, 3, 5, 7, 9], slice(9)),
    ([2, 4, 6, 8, *range(10, 26)], slice(8)),
    ([2, *range(10, 26, 2)], slice(16)),
    ([2, 24], slice(24)),
]
KV_LENS = [384, 150, 384, 200, 131, 129, 384, 100, 128, 64]
KV_LENS += [256 + 3 * i for i in range(14)] + [384, 290, 200, 330]
# Strides of 64 positions, full in the row, that it has in common with its group.
STRIDES = [5, 2, 6, 2, 2, 2, 2, 1, 2, 1] + [4, 2] * 7 + [6, 2, 0, 5]


@pytest.fixture(params=DTYPES)
def groups(request):
    """Decode rows in groups that interleave and share blocks."""
    shape = Shape(28, 28, 24, 16, 2, 3, 64, request.param, request.param)
    return make_batch(shape, [1] * 28, KV_LENS, shared=GROUPS)


def test_rows_that_share_blocks_have_the_same_values_alone(groups):
    together = _attend(groups)
    for row in range(28):
        alone, where = part_of(groups, row, at=row)
        np.testing.assert_array_equal(_attend(alone)[where], together[[row]])


def test_rows_read_what_they_share_together(groups, monkeypatch):
    """Or the test above would compare each row with itself."""
    results = []
    ffi_call = jax.ffi.ffi_call

    def spy(*args, **options):
        call = ffi_call(*args, **options)

        def run(*operands):
            results.append(call(*operands))
            return results[-1]

        return run

    monkeypatch.setattr(jax.ffi, "ffi_call", spy)
    paged_attention(*map(jnp.asarray, groups), scale=0.125, implementation="cpu")
    [(_, _, shared, _)] = results  # i32[3, R]: leaders, strides, order
    np.testing.assert_array_equal(shared[1], STRIDES)
