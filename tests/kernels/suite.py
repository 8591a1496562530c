"""What every implementation of `paged_attention` must do; one subclass for each.

The oracle is float64 NumPy. All KV rows that no token may see are NaN in every case.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels import EVERYTHING, paged_attention
from tests.kernels import numpy_oracle
from tests.kernels.batches import Batch, Shape, make_batch, part_of
from tests.kernels.cases import CASES, FULL, MANY, MIXED, SHAPES, SHARED


def tolerance(shape: Shape) -> float:
    """Absolute error allowed where values are about 1."""
    exact = shape.q_dtype == shape.kv_dtype == "float32"
    return 2e-6 if exact else 1e-2


class AttentionSuite:
    """Subclass it as `Test...` and name the implementation."""

    implementation: str
    caps_logits: bool = True

    def attend(self, batch: Batch, window: int | None = None) -> np.ndarray:
        """f32[T, Hq, D] of the implementation under test."""
        return np.asarray(_attend(self.implementation, window)(*batch), np.float32)

    def check(self, batch: Batch, atol: float, window: int | None = None) -> None:
        """Compare with the oracle; tokens without a defined value must be finite."""
        self.compare(self.attend(batch, window), batch, atol, window=window)

    def compare(
        self, actual: np.ndarray, batch: Batch, atol: float, **options: Any
    ) -> None:
        """Compare an outcome with the oracle's."""
        expected = numpy_oracle.paged_attention(
            *batch[:-1], scale=_scale(batch), **options
        )
        assert np.isfinite(actual).all()
        defined = ~np.isnan(expected)
        np.testing.assert_allclose(
            actual[defined], expected[defined], rtol=0, atol=atol
        )

    @pytest.mark.parametrize("name", CASES)
    def test_case(self, name):
        shape, q_lens, kv_lens = CASES[name]
        self.check(make_batch(shape, q_lens, kv_lens), tolerance(shape))

    @pytest.mark.parametrize("name", SHAPES)
    def test_shape(self, name):
        """Decode rows, an empty row and chunks that fill the token axis."""
        shape = SHAPES[name]
        rng = np.random.default_rng(0)
        decode = min(shape.rows - 1, shape.tokens // 2, shape.rows // 2 + 3)
        chunks = shape.rows - decode
        cuts = np.sort(rng.integers(0, shape.tokens - decode + 1, chunks - 1))
        q_lens = np.diff(cuts, prepend=0, append=shape.tokens - decode)
        q_lens = np.minimum([1] * decode + list(q_lens), shape.capacity)
        kv_lens = rng.integers(q_lens, shape.capacity + 1)
        kv_lens[q_lens == 0] = 0
        kv_lens[0] = shape.capacity
        batch = make_batch(shape, q_lens, kv_lens, num_decode=decode)
        self.check(batch, tolerance(shape))

    def test_number_of_decode_rows_may_be_static(self):
        shape, q_lens, kv_lens = CASES["decode ragged"]
        batch = make_batch(shape, q_lens, kv_lens)

        @jax.jit
        def attend(q, *rest):
            return paged_attention(
                q,
                *rest,
                shape.rows,
                scale=_scale(batch),
                implementation=self.implementation,
            )

        np.testing.assert_array_equal(attend(*batch[:-1]), self.attend(batch))

    @pytest.mark.parametrize("num_decode", [0, 1, 4])
    def test_rows_of_one_token_may_be_chunks(self, num_decode):
        batch = make_batch(
            MIXED, [1, 1, 1, 1, 9], [40, 1, 16, 130, 60], num_decode=num_decode
        )
        self.check(batch, tolerance(MIXED))

    @pytest.mark.parametrize("seed", range(6))
    def test_random_lengths(self, seed):
        rng = np.random.default_rng(seed)
        num_decode = int(rng.integers(0, 6))
        cuts = np.sort(rng.integers(0, 65 - num_decode, 8 - num_decode))
        q_lens = [1] * num_decode + list(np.diff(cuts, prepend=0))
        room = np.array([FULL - n for n in q_lens])
        kv_lens = np.array(q_lens) + rng.integers(0, room + 1)
        kv_lens[np.array(q_lens) == 0] = 0
        batch = make_batch(MIXED, q_lens, kv_lens, num_decode=num_decode, seed=seed)
        self.check(batch, tolerance(MIXED))

    @pytest.mark.parametrize("name", SHARED)
    def test_rows_may_share_blocks(self, name):
        shape, q_lens, kv_lens, shared = SHARED[name]
        batch = make_batch(shape, q_lens, kv_lens, shared=shared)
        self.check(batch, tolerance(shape))

    def test_rows_may_name_the_same_blocks_beyond_their_kv(self):
        """Row 0 reaches 130 positions; that its table goes on like others is chance."""
        batch = make_batch(
            MANY, [1] * 24, [130] + [400] * 23, shared=[(range(24), slice(24))]
        )
        batch.table[0] = batch.table[1]
        self.check(batch, tolerance(MANY))

    @pytest.mark.parametrize(
        ("name", "window"),
        [(None, 1), (None, 5), (None, 16), (None, 100), (None, 1000)]
        + [("bf16, GQA 5, D 80, B 12", 70)],
    )
    def test_a_token_may_see_a_window(self, name, window):
        """Less than a block, a block, across strides of 64, and more than there is."""
        shape = MIXED if name is None else SHAPES[name]
        kv_lens = [63, 160, 0, shape.capacity, 200, 3, 129, 75]
        batch = make_batch(shape, [1, 1, 1, 1, 40, 3, 1, 11], kv_lens)
        self.check(batch, tolerance(shape), window)

    @pytest.mark.parametrize("traced", [False, True])
    def test_rows_that_share_blocks_may_see_a_window(self, traced):
        """It cuts the longer rows' view of what they share, not the shorter ones'."""
        shape, q_lens, kv_lens, shared = SHARED["by rows far apart"]
        batch = make_batch(shape, q_lens, kv_lens, shared=shared)
        if not traced:
            self.check(batch, tolerance(shape), 300)
            return
        attend = _attend_traced(self.implementation)
        for window in (300, 10, EVERYTHING):
            out = np.asarray(attend(np.int32(window), *batch))
            self.compare(out, batch, tolerance(shape), window=window)

    @pytest.mark.parametrize("window", [1, 16, 100, EVERYTHING])
    def test_the_window_may_be_known_at_run_time_only(self, window):
        kv_lens = [63, 160, 0, MIXED.capacity, 200, 3, 129, 75]
        batch = make_batch(MIXED, [1, 1, 1, 1, 40, 3, 1, 11], kv_lens)
        out = _attend_traced(self.implementation)(np.int32(window), *batch)
        self.compare(np.asarray(out), batch, tolerance(MIXED), window=window)

    @pytest.mark.parametrize(
        "name", ["by decode rows and chunks", "by groups, in part"]
    )
    def test_logits_may_be_capped(self, name):
        """In all three walks: what rows share, decode rows, and chunks."""
        shape, q_lens, kv_lens, shared = SHARED[name]
        batch = make_batch(shape, q_lens, kv_lens, shared=shared)
        batch = batch._replace(q=batch.q * np.float32(4))
        cap = 2.0
        attend = functools.partial(
            paged_attention,
            scale=_scale(batch),
            soft_cap=cap,
            implementation=self.implementation,
        )
        if not self.caps_logits:
            with pytest.raises(NotImplementedError, match=r"soft_cap=2\.0"):
                attend(*batch)
            return
        out = np.asarray(jax.jit(lambda *args: attend(*args))(*batch))
        self.compare(out, batch, tolerance(shape), soft_cap=cap)

    def test_large_logits_do_not_overflow(self):
        batch = make_batch(MIXED, [1, 1, 20], [200, 3, 20])
        batch = batch._replace(q=batch.q * np.float32(100))
        # The logits reach 1e3, where one float32 step is 1e-4 of a weight.
        self.check(batch, 1e-3)

    def test_a_row_does_not_see_its_batch_mates(self):
        """Bit-equal alone, among others, and under another row number."""
        others = make_batch(MIXED, [1, 1, 1, 1, 22, 9], [9, 203, 300, 17, 150, 25])
        together = self.attend(others)
        for row, at in [(1, 0), (2, 3), (4, 0), (4, 5), (5, 2)]:
            alone, where = part_of(others, row, at=at)
            start, stop = others.cu_q_lens[row : row + 2]
            np.testing.assert_array_equal(
                self.attend(alone)[where], together[start:stop]
            )

    def test_a_chunk_may_be_cut_anywhere(self):
        """40 tokens at once, in 3 chunks, and by decode: the same values."""
        whole = make_batch(MIXED, [40], [140])
        expected = self.attend(whole)[:40]
        got = []
        for first, last in [(0, 17), (17, 33), *[(i, i + 1) for i in range(33, 40)]]:
            part, where = part_of(whole, 0, slice(first, last))
            got.append(self.attend(part)[where])
        np.testing.assert_allclose(
            np.concatenate(got), expected, rtol=0, atol=tolerance(MIXED)
        )


def _scale(batch: Batch) -> float:
    return batch.q.shape[-1] ** -0.5


@functools.cache
def _attend_traced(implementation: str):
    def attend(window, q, *rest):
        return paged_attention(
            q,
            *rest,
            scale=q.shape[-1] ** -0.5,
            window=window,
            implementation=implementation,
        )

    return jax.jit(attend)


@functools.cache
def _attend(implementation: str, window: int | None):
    def attend(q, *rest):
        return paged_attention(
            q,
            *rest,
            scale=q.shape[-1] ** -0.5,
            window=window,
            implementation=implementation,
        )

    return jax.jit(attend)
