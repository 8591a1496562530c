"""Logits processors on the device against their definition, whatever the slots hold."""

from __future__ import annotations

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import SamplingParams
from jaxserve.config import EngineConfig
from jaxserve.device import processors
from jaxserve.processors import Setup, pack_setup
from jaxserve.processors import processors as made_of
from tests.processing import Numbers, process_as, random_fields

# The context is counted 512 columns at a time: three pieces, the last not whole.
CONFIG = EngineConfig(
    max_model_len=1200,
    max_num_seqs=5,
    max_num_batched_tokens=16,
    block_size=16,
    num_blocks=80,
    max_logit_bias=6,
    max_bad_words=9,
)


def params_of(rng: random.Random, vocab: int) -> SamplingParams:
    """Parameters with at least one processor."""
    while True:
        fields = random_fields(rng, vocab)
        for name in ("min_tokens", "prompt_logprobs", "skip_reading_prefix_cache"):
            fields.pop(name, None)
        if fields:
            return SamplingParams(**fields)


@pytest.mark.parametrize("vocab", [8, 64, 97, 256])
def test_rows_are_processed_as_their_requests_say(vocab: int) -> None:
    """Slots taken again and again, their outputs growing; some rows have no tables."""
    shape, rng = CONFIG.shape(80), random.Random(vocab)
    s, write = shape.max_slots, processors.compiled(vocab, shape)
    tables = processors.init(vocab, shape)
    draw = jax.jit(processors.drawn)
    apply = jax.jit(processors.apply, static_argnums=4)
    requests: dict[int, tuple] = {}
    for turn in range(24):
        if turn < s or rng.random() < 0.4:
            slot = turn if turn < s else rng.randrange(s)
            params = params_of(rng, vocab)
            made = made_of(params, (), vocab, shape, Numbers().encode)
            length = rng.choice([1, 3, 20, 511, 512, 513, 1100])
            context = [rng.randrange(vocab) for _ in range(length)]
            prompt = length if rng.random() < 0.5 else rng.randint(1, length)
            if made is not None:
                setup = Setup(slot, prompt, tuple(context), made)
                tables = write(tables, pack_setup(setup, shape, vocab))
                requests[slot] = params, context, prompt
        rows = [rng.choice([*requests, s]) for _ in range(6)]
        logits = np.round(np.random.default_rng(turn).normal(size=(6, vocab)) * 8) / 4
        logits = logits.astype(np.float32)
        logits[:, rng.randrange(vocab)] = -np.inf
        position = [len(requests[r][1]) if r < s else 0 for r in rows]
        given = (jnp.array(logits), jnp.array(rows), jnp.array(position))
        got = np.asarray(apply(tables, *given, shape))
        for row, slot in enumerate(rows):
            wanted = logits[row]
            if slot < s:
                params, context, prompt = requests[slot]
                wanted = process_as(params, wanted, context[:prompt], context[prompt:])
            np.testing.assert_array_equal(got[row], wanted)
        # Two of the slots draw a token each, the others none.
        new = rng.sample(sorted(requests), min(2, len(requests)))
        tokens = [rng.randrange(vocab) for _ in new]
        at = [len(requests[slot][1]) for slot in new]
        padding = [s] * (3 - len(new))
        tables = draw(
            tables,
            jnp.array(new + padding),
            jnp.array(at + [0] * len(padding)),
            jnp.array(tokens + [1] * len(padding)),
        )
        for slot, token in zip(new, tokens, strict=True):
            requests[slot][1].append(token)


def test_what_changes_nothing_needs_no_tables() -> None:
    shape = CONFIG.shape(80)

    def made(**fields):
        return made_of(SamplingParams(**fields), (), 8, shape, Numbers().encode)

    assert made() is None
    assert made(logit_bias={3: 0.0}, allowed_token_ids=range(8)) is None
    assert made(repetition_penalty=1, presence_penalty=0, bad_words=[]) is None
    assert made(temperature=0.5, min_tokens=3, stop="a", logprobs=1) is None
    for field in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
        assert made(**{field: 0.5}) is not None


def test_a_bad_word_is_barred_at_a_texts_start_and_after_a_space() -> None:
    """vLLM's rule, but that both forms count whatever their lengths."""
    shape = CONFIG.shape(80)

    def encode(text: str) -> list[int]:
        return {"ab": [1, 2], " ab": [3], "c": [4], " c": [4], " d": [5]}.get(text, [])

    def barred(*words: str) -> tuple[list[int], tuple]:
        params = SamplingParams(bad_words=words)
        made = made_of(params, (), 8, shape, encode)
        assert made is not None
        may = np.unpackbits(np.frombuffer(made.mask, np.uint8), bitorder="little")
        return [] if not made.mask else np.flatnonzero(
            may == 0
        ).tolist(), made.bad_words

    assert barred("ab") == barred(" ab") == ([3], ((1, 2),))
    assert barred("c", "c") == ([4], ())
    assert barred("d") == ([5], ())  # "d" alone comes to nothing
    with pytest.raises(ValueError, match="bad_words='zz' must come to a token"):
        barred("c", "zz")


def test_the_tables_are_small() -> None:
    """Less than 2 MB for 64 requests of 2,048 tokens and a vocabulary of 49,152."""
    shape = dataclasses.replace(EngineConfig(num_blocks=8192)).shape(8192)
    tables = jax.eval_shape(lambda: processors.init(49_152, shape))
    assert sum(x.size * 4 for x in jax.tree.leaves(tables)) < 2 * 2**20
