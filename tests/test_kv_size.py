"""The KV cache's size by the formula, and by what an engine would allocate."""

from __future__ import annotations

import math

import jax
import pytest

from jaxserve.kv_size import kv_bytes_per_token
from jaxserve.models.decoder import Decoder
from jaxserve.models.decoder_config import AttentionKind, DecoderConfig
from jaxserve.models.rope import Rope


@pytest.mark.parametrize(
    ("layers", "kv_heads", "head_dim", "expected"),
    [
        # 2 for keys and values, times layers, heads, head size and 2 bytes.
        (32, 32, 128, 524_288),  # Llama-2-7B: 2 * 32 * 32 * 128 * 2 = 2**19
        (40, 40, 128, 819_200),  # Llama-2-13B: 4 * 40 * 40 * 128 = 512 * 1,600
        (80, 64, 128, 2_621_440),  # Llama-2-70B, were it MHA: 512 * 5,120
        (80, 8, 128, 327_680),  # Llama-2-70B: an eighth of that
        (32, 8, 128, 131_072),  # Llama-3-8B: a quarter of Llama-2-7B
        (24, 2, 64, 12_288),  # Qwen2.5-0.5B: 4 * 24 * 2 * 64
    ],
)
def test_bytes_of_public_models(layers, kv_heads, head_dim, expected) -> None:
    assert kv_bytes_per_token(layers, kv_heads, head_dim, 2) == expected
    assert kv_bytes_per_token(layers, kv_heads, head_dim) == expected
    assert kv_bytes_per_token(layers, kv_heads, head_dim, 4) == 2 * expected


def test_bytes_of_whole_sequences() -> None:
    assert 4096 * kv_bytes_per_token(32, 32, 128) == 2 * 2**30
    assert 4096 * kv_bytes_per_token(80, 8, 128) == 5 * 2**28  # 1.25 GiB
    assert 8192 * kv_bytes_per_token(32, 8, 128) == 2**30


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float32", 4)])
def test_an_engine_allocates_what_the_formula_says(dtype: str, size: int) -> None:
    decoder = Decoder(
        DecoderConfig(
            vocab_size=97,
            hidden_size=48,
            intermediate_size=32,
            num_layers=3,
            num_heads=6,
            num_kv_heads=2,
            head_dim=8,
            norm_epsilon=1e-5,
            attention=(AttentionKind(Rope((1.0, 0.1, 0.01, 0.001))),),
            tied=True,
            context_length=64,
            eos_ids=(),
            dtype=dtype,
        )
    )
    pages = jax.tree.leaves(decoder.page_shapes(5, 4))
    total = sum(math.prod(p.shape) * p.dtype.itemsize for p in pages)
    assert total == 5 * 4 * kv_bytes_per_token(3, 2, 8, size)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 8, 128), "num_layers=0 must be an integer >= 1"),
        ((32, 8.0, 128), "num_kv_heads=8.0 must"),
        ((32, 8, True), "head_dim=True must"),
        ((32, 8, 128, "2"), "dtype_bytes='2' must be an integer >= 1; take it from"),
    ],
)
def test_sizes_that_are_none_are_refused(sizes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kv_bytes_per_token(*sizes)
