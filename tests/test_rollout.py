"""Rollouts: arrays of what the model samples, and by which weights."""

from __future__ import annotations

import dataclasses
import gc
import pathlib
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import Engine, EngineConfig, SamplingParams
from jaxserve.core import random_seed
from jaxserve.models import load
from jaxserve.models.hash_model import HashModel
from jaxserve.rollout import Rollout, Rollouts, padded, sequences, token_logprobs
from pallas_kernels import cpu
from tests.models.dense_oracle import llama_logprobs
from tests.serving import direct

MODEL = HashModel(eos_ids=(7, 50))
CONFIG = EngineConfig(
    max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32, block_size=4
)
PROMPTS = [[5, 6, 7, 8, 9], [1, 2], [5, 6, 7, 8, 9, 10, 11, 12, 13]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
DRAWN = SamplingParams(n=3, max_tokens=8, ignore_eos=True)
TINY = pathlib.Path(__file__).parent / "fixtures" / "tiny_llama"


def rollouts(params=None, config: EngineConfig = CONFIG, **options) -> Rollouts:
    """Of the hash model."""
    params = MODEL.init_params() if params is None else params
    return Rollouts(MODEL, params, config, **options)


@pytest.fixture(scope="module")
def params():
    return MODEL.init_params()


@pytest.fixture(scope="module")
def shared(params) -> Rollouts:
    return rollouts(params)


def lists(rollout: Rollout) -> list[list[int]]:
    """The tokens under the mask, row by row."""
    pairs = zip(np.asarray(rollout.tokens), np.asarray(rollout.mask), strict=True)
    return [row[mask].tolist() for row, mask in pairs]


def test_rows_are_prompts_and_what_the_model_says(shared, params) -> None:
    rollout = shared(params, PROMPTS, GREEDY)
    assert all(isinstance(field, jax.Array) for field in rollout[:-1])
    outputs = [direct(prompt, 6, MODEL.eos_ids) for prompt in PROMPTS]
    assert lists(rollout) == outputs
    stopped = [output[-1] in MODEL.eos_ids for output in outputs]
    assert rollout.stopped.tolist() == stopped
    assert (
        rollout.tokens.shape == rollout.logprobs.shape == rollout.mask.shape == (3, 6)
    )
    assert rollout.mask.tolist() == [[i < len(o) for i in range(6)] for o in outputs]
    assert rollout.prompt_tokens.shape == (3, 16)  # of 9 and fewer
    for row, prompt in enumerate(PROMPTS):
        assert rollout.prompt_lengths[row] == len(prompt)
        padding = [0] * (16 - len(prompt))
        assert rollout.prompt_tokens[row].tolist() == prompt + padding
    assert rollout.weight_version == 0


def test_padding_bears_the_pad_id() -> None:
    made = rollouts(max_prompt_tokens=9, pad_id=96)
    params = MODEL.init_params()
    rollout = made(params, PROMPTS, GREEDY)
    assert rollout.prompt_tokens.shape == (3, 9)
    behind = np.arange(9)[None, :] >= np.asarray(rollout.prompt_lengths)[:, None]
    assert set(np.asarray(rollout.prompt_tokens)[behind].tolist()) == {96}
    ended = dataclasses.replace(GREEDY, max_tokens=30, stop_token_ids=(73,))
    rollout = made(params, [[*PROMPTS[0]], [1]], ended)
    unused = ~np.asarray(rollout.mask)
    assert unused.any() and (np.asarray(rollout.tokens)[unused] == 96).all()
    assert (np.asarray(rollout.logprobs)[unused] == 0).all()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_padded_prompts_are_the_ragged_ones(shared, params, side: str, array) -> None:
    tokens, mask = np.full((3, 11), 3, np.int32), np.zeros((3, 11), bool)
    for row, prompt in enumerate(PROMPTS):
        at = slice(0, len(prompt)) if side == "right" else slice(-len(prompt), None)
        tokens[row, at], mask[row, at] = prompt, True
    rollout = shared(params, array(tokens), GREEDY, mask=array(mask))
    assert lists(rollout) == [direct(p, 6, MODEL.eos_ids) for p in PROMPTS]
    assert rollout.prompt_tokens.shape == (3, 11)
    whole = shared(params, array(tokens[:, -2:]), GREEDY)
    assert whole.prompt_lengths.tolist() == [2, 2, 2]
    expected = [direct(row[-2:], 6, MODEL.eos_ids) for row in tokens.tolist()]
    assert lists(whole) == expected


def test_samples_of_a_prompt_follow_one_another(shared, params) -> None:
    """And each prompt draws from its own stream, made of the seed and its place."""
    rollout = shared(params, PROMPTS, dataclasses.replace(DRAWN, seed=4))
    engine = Engine(MODEL, params, CONFIG)
    for i, prompt in enumerate(PROMPTS):
        alone = dataclasses.replace(DRAWN, seed=random_seed(4, i, None))
        engine.add_request(str(i), prompt, alone)
        while engine.has_unfinished_requests():
            outputs = engine.step()
        expected = [one.token_ids for one in outputs[0].outputs]
        assert lists(rollout)[3 * i : 3 * i + 3] == expected
    assert rollout.prompt_lengths.tolist() == [5] * 3 + [2] * 3 + [9] * 3


def test_streams_differ_from_call_to_call_and_come_again(params) -> None:
    first, second = rollouts(params), rollouts(params)
    equal = [PROMPTS[0]] * 4
    one, two = (first(params, equal, DRAWN) for _ in "ab")
    drawn = [tuple(tokens) for tokens in lists(one) + lists(two)]
    assert len(set(drawn)) == 24  # 8 tokens each: none is another's by chance
    for expected in (one, two):
        assert lists(second(params, equal, DRAWN)) == lists(expected)
    other = rollouts(params, dataclasses.replace(CONFIG, seed=1))
    assert lists(other(params, equal, DRAWN)) != lists(one)


def test_a_seed_makes_a_call_repeatable_alone(shared, params) -> None:
    equal = [PROMPTS[0]] * 4
    seeded = [dataclasses.replace(DRAWN, seed=seed) for seed in (1, 1, 2)]
    one, again, other = (lists(shared(params, equal, each)) for each in seeded)
    assert one == again != other
    assert len({tuple(tokens) for tokens in one}) == 12


def biased(token: int):
    """Weights that make a token certain."""
    bias = jnp.zeros(97, jnp.float32).at[token].set(100.0)
    return {"bias": bias, "mark": jnp.int32(0)}


def test_weights_are_replaced_where_a_leaf_is_another_array(params) -> None:
    made = rollouts(params)
    greedy = dataclasses.replace(GREEDY, max_tokens=2)
    versions, tokens = [], []
    first, second = biased(3), biased(4)
    copied = {"bias": second["bias"] + 0, "mark": second["mark"]}
    for weights in (params, params, first, dict(first), second, copied, first):
        rollout = made(weights, PROMPTS[:1], greedy)
        versions.append(rollout.weight_version)
        tokens.append(lists(rollout)[0])
    assert versions == [0, 0, 1, 1, 2, 3, 4]
    expected = direct(PROMPTS[0], 2)
    assert tokens == [expected] * 2 + [[3, 3]] * 2 + [[4, 4]] * 2 + [[3, 3]]


def test_weights_written_to_in_place_are_other_ones() -> None:
    weights = {"bias": np.zeros(97, np.float32), "mark": np.int32(0)}
    made = rollouts(weights)
    made(weights, PROMPTS[:1], GREEDY)
    weights["bias"][5] = 100.0
    assert lists(made(weights, PROMPTS[:1], GREEDY)) == [[5] * 6]


def test_weights_that_a_learner_donated_may_be_gone(params) -> None:
    step = jax.jit(lambda old: jax.tree.map(lambda x: x + 1, old), donate_argnums=0)
    weights = jax.tree.map(lambda x: x + 0, params)
    made = rollouts(weights)
    for mark in (1, 2):
        made(weights, PROMPTS[:1], GREEDY)
        weights = step(weights)  # the engine's own, deleted
        assert made(weights, PROMPTS[:1], GREEDY).weight_version == mark


def test_old_weights_are_let_go_of(params) -> None:
    made = rollouts(params)
    weights = biased(3)
    made(weights, PROMPTS[:1], GREEDY)
    old = weakref.ref(weights["bias"])
    made(params, PROMPTS[:1], GREEDY)
    del weights
    gc.collect()
    assert old() is None


def test_after_warm_up_neither_weights_nor_prompts_compile_anything(params) -> None:
    made = rollouts(params, warmup=True)
    before = made.engine.stats()["compiles"]
    for token in (3, 4):
        weights = biased(token)
        assert made.update(weights) == token - 2
        made(weights, PROMPTS[: token - 2], DRAWN)
    assert made.engine.stats()["compiles"] == before > 0


def test_cached_prompts_are_found_again_only_with_their_weights(params) -> None:
    made = rollouts(params)
    prompt = [PROMPTS[2]]
    found = []
    for weights in (params, params, biased(3)):
        (output,) = made.generate(weights, prompt, GREEDY)
        found.append(output.num_cached_tokens)
    assert found == [0, 8, 0]


def test_kv_memory_that_was_released_comes_back(params) -> None:
    made = rollouts(params)
    made.engine.release_kv()
    assert lists(made(params, PROMPTS, GREEDY))[1] == direct([1, 2], 6, MODEL.eos_ids)
    assert not made.engine.released


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "prompts is empty"),
        ("text", {}, "prompts of type str must be a list"),
        ([[1], [97]], {}, r"prompts\[1\]: prompt_token_ids\[0\]=97"),
        ([[1], list(range(13))], {}, r"prompts\[1\] has 13 tokens, .* =12|=12"),
        (["text"], {}, "no tokenizer"),
        (np.zeros((2, 3)), {}, r"prompts of float64\[2, 3\] must be integers"),
        (np.zeros(3, np.int32), {}, r"int32\[3\] must be integers"),
        ([[1]], {"mask": np.ones((1, 1))}, "mask must be None"),
        (np.ones((2, 3), int), {"mask": np.ones((2, 2))}, r"shape \(2, 2\)"),
        (np.ones((1, 3), int), {"mask": np.zeros((1, 3))}, r"prompts\[0\]: .*at least"),
        ([[1]], {"sampling": SamplingParams(max_tokens=None)}, "max_tokens=None"),
    ],
)
def test_what_cannot_be_served_names_itself_and_leaves_nothing(
    params, prompts, options, message: str
) -> None:
    made = rollouts(params, max_prompt_tokens=12)
    options = {"sampling": GREEDY} | options
    with pytest.raises(ValueError, match=message):
        made(params, prompts, **options)
    assert lists(made(params, [[1, 2]], GREEDY)) == [direct([1, 2], 6, MODEL.eos_ids)]
    assert made.engine.holds_nothing()


def test_an_interrupt_leaves_nothing(params, monkeypatch) -> None:
    made = rollouts(params)
    steps, step = [], made.engine.step

    def interrupted():
        steps.append(0)
        if len(steps) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(made.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made(params, PROMPTS, DRAWN)
    assert lists(made(params, [[1, 2]], GREEDY)) == [direct([1, 2], 6, MODEL.eos_ids)]
    assert made.engine.holds_nothing()


def test_requests_of_others_are_in_the_way(params) -> None:
    made = rollouts(params)
    made.engine.add_request("mine", [1, 2], GREEDY)
    with pytest.raises(RuntimeError, match="serves other requests"):
        made(params, PROMPTS, GREEDY)


def test_outputs_of_several_weights_are_no_rollout(params) -> None:
    made = rollouts(params)
    sampling = dataclasses.replace(GREEDY, logprobs=0)
    outputs = made.generate(params, PROMPTS[:1], sampling)
    outputs += made.generate(biased(3), PROMPTS[:1], sampling)
    with pytest.raises(ValueError, match=r"weight versions \[0, 1\]"):
        padded(outputs, 6)


def plain_model(monkeypatch):
    """A decoder and its weights in the plain layout."""
    with monkeypatch.context() as off:
        off.setattr(cpu, "unavailable", lambda: "the weights are to be plain")
        return load(TINY, "float32")[:2]


def checked(model, weights, plain, rollout: Rollout) -> None:
    """Its log-probabilities are those of the sequences, by two forward passes."""
    rows = zip(
        np.asarray(rollout.prompt_tokens),
        np.asarray(rollout.prompt_lengths),
        lists(rollout),
        np.asarray(rollout.logprobs),
        strict=True,
    )
    for prompt, length, output, logprobs in rows:
        expected = llama_logprobs(model.config, plain, [*prompt[:length], *output])
        wanted = [expected[length - 1 + i, token] for i, token in enumerate(output)]
        np.testing.assert_allclose(logprobs[: len(output)], wanted, atol=1e-4)
    np.testing.assert_allclose(
        token_logprobs(model, weights, rollout), rollout.logprobs, atol=1e-4
    )


def test_logprobs_are_those_of_a_forward_pass_with_the_same_weights(monkeypatch):
    """With prompts found in the cache, truncated sampling, and weights that change:
    from those of the machine's kernels to plain ones, as a learner has them."""
    model, plain = plain_model(monkeypatch)
    weights = model.prepare(plain)
    few = dataclasses.replace(CONFIG, max_logprobs=0, max_num_batched_tokens=4)
    made = Rollouts(model, weights, few)  # few launch shapes, each of which compiles
    long = [(7 * i) % 90 + 3 for i in range(14)]
    prompts = [long, long[:5], [*long[:9], 4, 4]]
    sampling = SamplingParams(n=2, temperature=0.7, top_p=0.9, max_tokens=10)
    made(weights, prompts, sampling)
    (output, *_) = made.generate(weights, prompts, sampling)
    assert output.num_cached_tokens == 12
    rng = np.random.default_rng(0)
    for version in (0, 1, 2):
        rollout = made(weights, prompts, sampling)
        assert rollout.weight_version == version
        checked(model, weights, plain, rollout)
        weights = plain = jax.tree.map(
            lambda x: x + 0.1 * rng.standard_normal(x.shape, np.float32), plain
        )


def test_sequences_are_prompts_with_their_outputs() -> None:
    rollout = Rollout(
        prompt_tokens=jnp.array([[1, 2, 0, 0], [3, 4, 5, 6], [7, 0, 0, 0]]),
        prompt_lengths=jnp.array([2, 4, 1]),
        tokens=jnp.array([[11, 12, 0], [13, 14, 15], [16, 0, 0]]),
        logprobs=jnp.zeros((3, 3)),
        mask=jnp.array([[True, True, False], [True] * 3, [True, False, False]]),
        stopped=jnp.array([True, False, True]),
        weight_version=0,
    )
    assert jax.jit(sequences)(rollout).tolist() == [
        [1, 2, 11, 12, 0, 0, 0],
        [3, 4, 5, 6, 13, 14, 15],
        [7, 16, 0, 0, 0, 0, 0],
    ]
