"""What every implementation of `paged_attention` must do; one subclass for each.

The oracle is float64 NumPy. All KV rows that a token may not see are NaN in every case.
A case is data for one of a few compiled shapes: compiling is what takes the time.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from pallas_kernels import paged_attention
from tests.kernels import numpy_oracle
from tests.kernels.batches import Batch, Shape, make_batch

MIXED = Shape()
DECODE = Shape(tokens=8)
FULL = MIXED.capacity

# name: (shape, query lengths, KV lengths)
CASES = {
    "decode ragged": (DECODE, [1] * 8, [1, 2, 15, 16, 17, 128, 129, FULL]),
    "decode one row": (DECODE, [1], [100]),
    "decode idle rows": (DECODE, [1] * 8, [0, 5, 0, 0, 300, 0, 64, 0]),
    "decode all idle": (DECODE, [1] * 8, [0] * 8),
    "decode full tables": (DECODE, [1] * 8, [FULL] * 8),
    "decode in a mixed shape": (MIXED, [1] * 8, [7, 33, 1, FULL, 16, 0, 31, 255]),
    "one chunk from the start": (MIXED, [64], [64]),
    "one chunk after a prefix": (MIXED, [50], [50 + 77]),
    "one chunk that ends a full table": (MIXED, [64], [FULL]),
    "chunks from the start": (
        MIXED,
        [16, 13, 1, 7, 2, 9, 8, 8],
        [16, 13, 1, 7, 2, 9, 8, 8],
    ),
    "chunks after prefixes": (MIXED, [5, 32, 9, 1], [21, 48, 137, 129]),
    "chunks among empty rows": (MIXED, [0, 31, 0, 0, 20, 0], [0, 95, 0, 0, 20, 0]),
    "chunks without KV": (MIXED, [3, 40, 10], [0, 0, 10]),
    "mixed": (MIXED, [1, 1, 1, 1, 40, 3, 1, 11], [9, 160, 0, 17, 200, 3, 48, 27]),
    "mixed, every token used": (MIXED, [1, 1, 62], [FULL, 1, 190]),
    "nothing": (MIXED, [], []),
}
SHAPES = {
    "GQA 1, D 128, B 8": Shape(block=8, kv_heads=4, groups=1, head_size=128),
    "GQA 4, D 80, B 32": Shape(block=32, columns=9, kv_heads=2, groups=4, head_size=80),
    "GQA 8, D 64, B 16": Shape(kv_heads=1, groups=8),
    "GQA 4, 8 KV heads": Shape(kv_heads=8, groups=4, columns=10, head_size=128),
    "bf16 pages": Shape(kv_dtype="bfloat16"),
    "bf16": Shape(q_dtype="bfloat16", kv_dtype="bfloat16"),
    "bf16 queries": Shape(q_dtype="bfloat16"),
    "bf16, D 128": Shape(
        q_dtype="bfloat16", kv_dtype="bfloat16", kv_heads=2, groups=4, head_size=128
    ),
    "B 256": Shape(block=256, columns=2, kv_heads=2, groups=2, head_size=32),
    "one row": Shape(tokens=3, rows=1, kv_heads=2, groups=1, head_size=32),
    "fewer tokens than rows": Shape(tokens=5, kv_heads=2, groups=2, head_size=32),
    "many rows": Shape(tokens=70, rows=43, kv_heads=1, groups=2, head_size=32),
    "many tokens": Shape(tokens=600, rows=7, kv_heads=1, groups=2, head_size=32),
}


# name: (shape, query lengths, KV lengths, what is shared)
MANY = Shape(24, rows=24, columns=32, kv_heads=2, groups=2, head_size=32)
SHARED = {
    "by decode rows and chunks": (
        MIXED,
        [1, 1, 1, 20, 20],
        [70, 65, 150, 90, 84],
        [(range(5), slice(4))],
    ),
    "by all": (MANY, [1] * 24, range(300, 420, 5), [(range(24), slice(16))]),
    "by all, with a gap": (
        MANY,
        [1] * 24,
        [400] * 24,
        [(range(24), slice(8)), (range(24), slice(16, 24))],
    ),
    "by all, all of it": (MANY, [1] * 24, [500] * 24, [(range(24), slice(32))]),
    "by groups, in part": (
        MANY,
        [1] * 24,
        [385, 512, 130, 300, 100, 127, 128, 384, 0]
        + [150, 144, 129, 512, 0, 200]
        + [300, 310, 260, 1, 400, 400, 512, 0, 77],
        [
            (range(9), slice(24)),
            (range(9, 15), slice(9)),
            (range(15, 18), slice(16)),
            ([19, 20], slice(32)),
        ],
    ),
    "by rows far apart": (
        MANY,
        [1] * 24,
        range(256, 496, 10),
        [
            (range(0, 24, 3), slice(8)),
            (range(1, 24, 3), slice(16)),
            (range(2, 24, 3), slice(9)),
        ],
    ),
}


def tolerance(shape: Shape) -> float:
    """Absolute error allowed where values are about 1."""
    exact = shape.q_dtype == shape.kv_dtype == "float32"
    return 2e-6 if exact else 1e-2


class AttentionSuite:
    """Subclass it as `Test...` and name the implementation."""

    implementation: str

    def attend(self, batch: Batch) -> np.ndarray:
        """f32[T, Hq, D] of the implementation under test."""
        return np.asarray(_attend(self.implementation)(*batch), np.float32)

    def check(self, batch: Batch, atol: float) -> None:
        """Compare with the oracle; tokens without a defined value must be finite."""
        expected = numpy_oracle.paged_attention(*batch[:-1], scale=_scale(batch))
        actual = self.attend(batch)
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
            start, stop = others.cu_q_lens[row : row + 2]
            count = stop - start
            is_decode = row < others.num_decode
            # Rows before `at` hold one idle token each, or none before a chunk.
            q_lens = np.zeros(MIXED.rows, np.int32)
            q_lens[:at] = is_decode
            q_lens[at] = count
            cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
            q = np.zeros_like(others.q)
            q[cu_q_lens[at] : cu_q_lens[at] + count] = others.q[start:stop]
            table = np.zeros_like(others.table)
            table[at] = others.table[row]
            kv_lens = np.zeros_like(others.kv_lens)
            kv_lens[at] = others.kv_lens[row]
            alone = Batch(
                q,
                others.pages,
                table,
                kv_lens,
                cu_q_lens,
                np.int32(at + 1 if is_decode else 0),
            )
            moved = self.attend(alone)[cu_q_lens[at] : cu_q_lens[at] + count]
            np.testing.assert_array_equal(moved, together[start:stop])

    def test_a_chunk_may_be_cut_anywhere(self):
        """40 tokens at once, in 3 chunks, and by decode: the same values."""
        whole = make_batch(MIXED, [40], [140])
        expected = self.attend(whole)[:40]
        got = []
        for first, last in [(0, 17), (17, 33), *[(i, i + 1) for i in range(33, 40)]]:
            count = last - first
            q = np.zeros_like(whole.q)
            q[:count] = whole.q[first:last]
            cu_q_lens = np.full(MIXED.rows + 1, count, np.int32)
            cu_q_lens[0] = 0
            kv_lens = np.zeros_like(whole.kv_lens)
            kv_lens[0] = 100 + last
            part = whole._replace(
                q=q,
                kv_lens=kv_lens,
                cu_q_lens=cu_q_lens,
                num_decode=np.int32(count == 1),
            )
            got.append(self.attend(part)[:count])
        np.testing.assert_allclose(
            np.concatenate(got), expected, rtol=0, atol=tolerance(MIXED)
        )


def _scale(batch: Batch) -> float:
    return batch.q.shape[-1] ** -0.5


@functools.cache
def _attend(implementation: str):
    def attend(q, *rest):
        return paged_attention(
            q, *rest, scale=q.shape[-1] ** -0.5, implementation=implementation
        )

    return jax.jit(attend)
