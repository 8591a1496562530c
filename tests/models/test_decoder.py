"""The decoder against transformers: tiny models at every position, however scheduled.

The references are `logits.npz` beside each tiny model (tools/make_fixtures.py).
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.models import load
from jaxserve.models.decoder import Decoder
from jaxserve.models.decoder_config import DecoderConfig
from pallas_kernels import cpu
from pallas_kernels.cpu import PANEL
from pallas_kernels.packed import Packed
from tests.models.paged import PagedRun, forward

FIXTURES = pathlib.Path(__file__).resolve().parents[1] / "fixtures"
MODELS = ("tiny_llama", "tiny_llama_tied")
FILES = ("", "model.gguf")
TOLERANCE = 1e-4


@pytest.fixture(params=["kernels", "xla"], autouse=True)
def arithmetic(request, monkeypatch):
    """Every test here runs on packed weights and kernels, and in plain XLA."""
    if request.param == "xla":
        monkeypatch.setattr(cpu, "unavailable", lambda: "this test is of XLA")


def loaded(model: str, file: str = ""):
    return _loaded(model, file, cpu.unavailable())


@functools.cache
def _loaded(model: str, file: str, kernels_off: str | None):
    del kernels_off
    return load(FIXTURES / model / file, "float32")


def plain(embedding) -> jax.Array:
    """An embedding [V, d] that may be packed."""
    if isinstance(embedding, Packed):
        return embedding.rows(jnp.arange(embedding.words.shape[1] * PANEL))
    return embedding


@functools.cache
def reference(model: str) -> dict[str, tuple[list[int], np.ndarray]]:
    """Prompt ids and f32[n, V] logits by name."""
    with np.load(FIXTURES / model / "logits.npz") as saved:
        ends = np.cumsum(saved["prompt_lengths"])
        spans = list(zip([0, *ends], ends, strict=False))
        return {
            f"p{index}": (saved["prompt_ids"][a:b].tolist(), saved["logits"][a:b])
            for index, (a, b) in enumerate(spans)
        }


def check(model: str, run: PagedRun, steps: list[dict[str, int]]) -> None:
    """Feed the prompts in `steps` (tokens by prompt) and compare every logit."""
    expected = reference(model)
    for step in steps:
        at = {name: run.lengths.get(name, 0) for name in step}
        new = {n: expected[n][0][at[n] : at[n] + count] for n, count in step.items()}
        for name, logits in run.step(new).items():
            wanted = expected[name][1][at[name] : at[name] + len(logits)]
            np.testing.assert_allclose(logits, wanted, atol=TOLERANCE, rtol=0)
    assert run.lengths == {name: len(ids) for name, (ids, _) in expected.items()}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("model", MODELS)
def test_one_batch_holds_all_prompts(model, file):
    decoder, params, _ = loaded(model, file)
    lengths = {name: len(ids) for name, (ids, _) in reference(model).items()}
    check(model, PagedRun(decoder, params), [lengths])


@pytest.mark.parametrize("model", MODELS)
def test_odd_chunks(model):
    decoder, params, _ = loaded(model)
    left = {name: len(ids) for name, (ids, _) in reference(model).items()}
    steps = []
    for size in (1, 2, 3, 5, 7, 11, 13, 17, 19, 23, 29):
        step = {name: min(size, count) for name, count in left.items() if count}
        left = {name: count - step.get(name, 0) for name, count in left.items()}
        steps.append(step)
    check(model, PagedRun(decoder, params, seed=1), steps)


def test_prompts_end_as_decode_rows():
    decoder, params, _ = loaded("tiny_llama")
    lengths = {n: len(ids) for n, (ids, _) in reference("tiny_llama").items()}
    last = {name: min(length, 12) for name, length in lengths.items()}
    steps = [
        {name: lengths[name] - last[name] for name in lengths if lengths[name] > 12}
    ]
    for done in range(12):
        steps.append({name: 1 for name, count in last.items() if count > done})
    check("tiny_llama", PagedRun(decoder, params, seed=2), steps)


@settings(max_examples=15)
@given(st.integers(0, 2**32))
def test_any_schedule(seed):
    decoder, params, _ = loaded("tiny_llama")
    rng = random.Random(seed)
    left = {n: len(ids) for n, (ids, _) in reference("tiny_llama").items()}
    steps = []
    while any(left.values()):
        drawn = {
            name: rng.choice([0, 1, 1, count // 2, count])
            for name, count in left.items()
        }
        step = {name: min(drawn[name], left[name]) for name in left}
        steps.append({name: count for name, count in step.items() if count})
        left = {name: left[name] - step[name] for name in left}
    run = PagedRun(decoder, params, seed=seed)
    check("tiny_llama", run, [step for step in steps if step])


def test_padding_is_finite_and_writes_nothing():
    decoder, params, _ = loaded("tiny_llama")
    run = PagedRun(decoder, params)
    batch = run.batch({"decode": [3], "chunk": [5, 6, 7]})
    # An idle decode row in front: one token, nothing to attend to, nothing to write.
    idle = batch._replace(
        kv_lens=batch.kv_lens.at[0].set(0),
        write_block=batch.write_block.at[0].set(run.num_blocks),
    )
    before = np.asarray(run.pages["kv"])
    every = np.arange(run.rows, dtype=np.int32)
    logits, pages = forward(decoder)(params, run.pages, idle, every)
    after = np.asarray(pages["kv"])
    assert np.isfinite(np.asarray(logits)).all()
    layers, block = decoder.config.num_layers, int(batch.write_block[1])
    written = np.zeros(before.shape[:2], bool)
    written[[layer * run.num_blocks + block for layer in range(layers)], :3] = True
    assert np.isfinite(after[written]).all()
    np.testing.assert_array_equal(after[~written], before[~written])


def test_the_cache_is_never_copied():
    decoder, params, _ = loaded("tiny_llama")
    batch = PagedRun(decoder, params).batch({"a": [1, 2, 3]})
    temporary = []
    for num_blocks in (1000, 4000):
        pages = decoder.page_shapes(num_blocks, 4)
        lowered = jax.jit(decoder.forward, donate_argnums=1).lower(params, pages, batch)
        memory = lowered.compile().memory_analysis()
        size = pages["kv"].size * pages["kv"].dtype.itemsize
        assert memory.alias_size_in_bytes == size
        temporary.append(memory.temp_size_in_bytes)
    assert temporary[0] == temporary[1] < size


def test_kernels_are_given_valid_pages_of_their_layer(monkeypatch):
    decoder, params, _ = loaded("tiny_llama")
    run = PagedRun(decoder, params, tokens=8)
    batch = run.batch({"a": [1, 2, 3]})
    tables = []

    def attend(qkv, cos, sin, pages, page_ids, offsets, table, *rest, **options):
        tables.append(np.asarray(table))
        return qkv[:, : decoder.config.num_heads], pages

    monkeypatch.setattr("jaxserve.models.decoder.rotary_attention", attend)
    with jax.disable_jit():
        decoder.forward(params, run.pages, batch)
    block = int(batch.table[0, 0])
    for layer, table in enumerate(tables):
        first = layer * run.num_blocks
        assert table[0, 0] == first + block
        assert first <= table.min() and table.max() < first + run.num_blocks
    assert len(tables) == 2


def test_one_row_is_as_any_other():
    decoder, params, _ = loaded("tiny_llama")
    ids, wanted = reference("tiny_llama")["p1"]
    alone = PagedRun(decoder, params, tokens=8, rows=1).step({"a": ids}, every=False)
    np.testing.assert_allclose(alone["a"], wanted[-1], atol=TOLERANCE, rtol=0)


ROWS = [f"{row}" for row in range(8)]


def test_jx5_other_tokens_of_its_neighbours_change_no_bit_of_a_row():
    """JX5 (vllm#48271, imp#1314): part of what changed with the batch was a leak."""
    decoder, params, _ = loaded("tiny_llama")
    rng = np.random.default_rng(0)
    lengths = {row: int(n) for row, n in zip(ROWS, rng.integers(1, 12, 8), strict=True)}
    runs = [PagedRun(decoder, params, rows=8) for _ in range(2)]
    for step in (lengths, *[dict.fromkeys(ROWS, 1)] * 3):
        told = []
        mine = rng.integers(0, 96, step["0"]).tolist()
        for run in runs:
            tokens = {row: rng.integers(0, 96, n).tolist() for row, n in step.items()}
            told.append(run.step({**tokens, "0": mine}, every=False))
        assert (told[0]["1"] != told[1]["1"]).any()
        np.testing.assert_array_equal(told[0]["0"], told[1]["0"])


def test_jx5_a_row_alone_and_among_eight_agree_within_rounding():
    """JX5: the other part is rounding, which stays under a stated bound."""
    decoder, params, _ = loaded("tiny_llama")
    rng = np.random.default_rng(1)
    prompts = {row: rng.integers(0, 96, 6).tolist() for row in ROWS}
    crowd = PagedRun(decoder, params).step(prompts, every=False)["3"]
    run = PagedRun(decoder, params, tokens=8, rows=1)
    alone = run.step({"3": prompts["3"]}, every=False)["3"]
    np.testing.assert_allclose(alone, crowd, atol=TOLERANCE, rtol=0)
    second, best = np.sort(crowd)[-2:]
    assert best - second >= 1e-3  # so the bound decides
    assert alone.argmax() == crowd.argmax()


def test_ml3_tied_head_is_the_embedding_exactly():
    """ML3 (sglang#1508, vllm#53020): a head that no file had stayed random."""
    decoder, params, _ = loaded("tiny_llama_tied")
    untied = Decoder(dataclasses.replace(decoder.config, tied=False))
    ids = {"a": [7, 3, 9, 1]}
    tied = PagedRun(decoder, params).step(ids)["a"]
    head = {**params, "head": jax.tree.map(jnp.array, params["embed"])}
    # The embedding of an untied model is looked up only, and never packed.
    head["embed"] = plain(params["embed"])
    np.testing.assert_array_equal(PagedRun(untied, head).step(ids)["a"], tied)


def test_bfloat16_holds_bfloat16_weights_and_pages():
    decoder, params, _ = load(FIXTURES / "tiny_llama", "bfloat16")
    run = PagedRun(decoder, params)
    ids, wanted = reference("tiny_llama")["p3"]
    logits = run.step({"a": ids})["a"]
    assert logits.dtype == np.float32
    assert run.pages["kv"].dtype == params["layers"]["qkv"].dtype == jnp.bfloat16
    # Eight bits of mantissa leave about 1% after two layers; the logits spread by 1.3.
    assert np.sqrt(np.mean(np.square(logits - wanted))) < 0.04


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3}, "num_heads=3 must be a multiple of num_kv_heads=2"),
        ({"head_dim": 18}, "rope has 8 frequencies and head_dim=18 needs 9"),
        ({"layer_kinds": (0,)}, "layer_kinds has 1 entries .* num_layers=2"),
        ({"layer_kinds": (0, 1)}, r"layer_kinds=\(0, 1\) must index the 1 kinds given"),
        ({"attention": ()}, "layer_kinds has 0 entries for 0 kinds"),
        ({"dtype": "float16"}, "dtype='float16' must be 'bfloat16' or 'float32'"),
    ],
)
def test_config_refuses(change, message):
    config: DecoderConfig = loaded("tiny_llama")[0].config
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, **change)
