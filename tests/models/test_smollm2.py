"""SmolLM2-135M-Instruct against transformers: logits, greedy tokens, tokenizer.

The references are smollm2_*.npz and .json (tools/make_fixtures.py).
"""

from __future__ import annotations

import functools
import json
import pathlib

import numpy as np

from jaxserve.models import load, smollm2_path
from tests.models.paged import PagedRun

FIXTURES = pathlib.Path(__file__).resolve().parents[1] / "fixtures"
MARGIN = 1e-3
"""Where the two best logits are closer than this, either token is right."""


@functools.cache
def loaded(dtype: str):
    return load(smollm2_path(), dtype)


@functools.cache
def reference() -> dict[str, np.ndarray]:
    with np.load(FIXTURES / "smollm2_greedy.npz") as saved:
        return dict(saved)


@functools.cache
def prompts() -> dict[str, list[int]]:
    names = json.loads((FIXTURES / "smollm2_greedy.json").read_text())["names"]
    ends = np.cumsum(reference()["prompt_lengths"])[:-1]
    parts = np.split(reference()["prompt_ids"], ends)
    return {name: ids.tolist() for name, ids in zip(names, parts, strict=True)}


def run(dtype: str, tokens: int) -> PagedRun:
    decoder, params, _ = loaded(dtype)
    return PagedRun(
        decoder,
        params,
        block_size=16,
        num_blocks=128,
        columns=20,
        tokens=tokens,
        rows=16,
    )


def test_prompt_logits_and_greedy_tokens():
    expected = reference()
    cache = run("float32", 512)
    left = prompts()
    logits = {}
    while any(left.values()):  # chunks of 128: the long prompt takes two
        step, room = {}, 512
        for name, ids in left.items():
            count = min(len(ids), 128, room)
            step |= {name: ids[:count]} if count else {}
            room -= count
        left = {name: ids[len(step.get(name, [])) :] for name, ids in left.items()}
        logits |= cache.step(step, every=False)
    for row, name in enumerate(prompts()):
        for ids, values in (
            (expected["top_ids"][row], expected["top_logits"][row]),
            (expected["sample_ids"], expected["sample_logits"][row]),
        ):
            np.testing.assert_allclose(logits[name][ids], values, atol=1e-3, rtol=0)
    # Feed the reference's tokens, so that one close call does not decide the rest.
    decode = run("float32", 16)
    decode.pages, decode._blocks, decode._free = cache.pages, cache._blocks, cache._free
    decode.lengths = cache.lengths
    checked = 0
    for step in range(expected["tokens"].shape[1]):
        for row, name in enumerate(prompts()):
            if expected["margins"][row, step] > MARGIN:
                assert logits[name].argmax() == expected["tokens"][row, step]
                checked += 1
        new = {name: [int(expected["tokens"][r, step])] for r, name in enumerate(left)}
        logits = decode.step(new, every=False)
    assert checked > 16 * 48 * 0.99


def test_bfloat16_agrees_within_its_precision():
    expected = reference()
    cache = run("bfloat16", 1024)
    logits = cache.step(prompts(), every=False)
    errors, values, rows = [], [], list(prompts())
    for row, name in enumerate(rows):
        for ids, wanted in (
            (expected["top_ids"][row], expected["top_logits"][row]),
            (expected["sample_ids"], expected["sample_logits"][row]),
        ):
            errors.append(logits[name][ids] - wanted)
            values.append(wanted)
    largest = max(np.abs(error).max() for error in errors)
    relative = np.linalg.norm(np.concatenate(errors)) / np.linalg.norm(
        np.concatenate(values)
    )
    assert relative <= 3e-2
    clear = np.flatnonzero(expected["margins"][:, 0] > 2 * largest)
    assert len(clear) > 4
    for row in clear:
        assert logits[rows[row]].argmax() == expected["tokens"][row, 0]


def test_tokenizer_ids():
    tokenizer = loaded("bfloat16")[2]
    cases = json.loads((FIXTURES / "smollm2_tokenizer.json").read_text("utf-8"))
    assert len(cases) > 200
    for text, ids in cases:
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_tokenizer_facts():
    decoder, _, tokenizer = loaded("bfloat16")
    assert tokenizer.vocab_size == decoder.vocab_size == 49152
    assert tokenizer.eos_ids == decoder.eos_ids == (2,)
    assert tokenizer.encode("") == []  # this checkpoint adds no BOS
    assert tokenizer.decode([1, 19556, 2]) == "Hello"
    assert tokenizer.decode([1, 19556, 2], skip_special_tokens=False) == (
        "<|im_start|>Hello<|im_end|>"
    )


def test_chat_prompts():
    tokenizer = loaded("bfloat16")[2]
    texts = json.loads((FIXTURES / "smollm2_greedy.json").read_text("utf-8"))
    rendered = dict(zip(texts["names"], texts["texts"], strict=True))
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == rendered["capital"]
    assert tokenizer.apply_chat_template(messages) == prompts()["capital"]
    assert tokenizer.encode(text) == prompts()["capital"]
    turns = [
        {"role": "user", "content": "Name a prime number."},
        {"role": "assistant", "content": "Seven is a prime number."},
        {
            "role": "user",
            "content": "Name the next one and explain why it is prime.",
        },
    ]
    assert tokenizer.apply_chat_template(turns) == prompts()["turns"]
