"""One compile per shape (docs/design.md, contract 7): after warm-up, none."""

import dataclasses

import numpy as np
import pytest

from jaxserve import Engine, EngineConfig, SamplingParams
from jaxserve.config import bucket
from jaxserve.executors.jax_executor import JaxExecutor
from jaxserve.models.hash_model import HashModel
from tests.processing import Numbers

CONFIG = EngineConfig(
    block_size=4,
    num_blocks=13,  # tight: requests are swapped
    num_swap_blocks=40,
    preemption_mode="swap",
    max_num_seqs=5,
    max_model_len=40,
    max_num_batched_tokens=37,
    num_scheduler_steps=2,
    max_logprobs=2,
)


@pytest.fixture(scope="module")
def warm_engine() -> Engine:
    # Its own eos_ids keep this engine's programs apart from every other test's.
    model = HashModel(eos_ids=(91, 92, 93))
    engine = Engine(model, model.init_params(), CONFIG, tokenizer=Numbers())
    assert isinstance(engine.executor, JaxExecutor)
    engine.executor.warmup(iter, transfers=True)
    return engine


def test_warm_up_compiles_the_listed_set(warm_engine: Engine) -> None:
    shape = warm_engine.shape
    both_ways = 2 * len(shape.transfer_buckets)
    launches, others = len(shape.launch_shapes()), 2  # a fork, a slot's tables
    assert warm_engine.stats()["compiles"] == launches + both_ways + others


@pytest.mark.parametrize("launches", [1, 2])
def test_nothing_compiles_after_warm_up(warm_engine: Engine, launches: int) -> None:
    before = warm_engine.stats()["compiles"]
    rng = np.random.default_rng(launches)
    variants = [
        SamplingParams(temperature=temperature, logprobs=logprobs, **more)
        for temperature in (0.0, 1.0)
        for logprobs in (None, 0, 2)
        for more in ({}, {"top_k": 3}, {"top_p": 0.5, "min_p": 0.1}, {"seed": 7})
    ]
    variants += [
        SamplingParams(temperature=float(i % 2), **more)
        for i, more in enumerate(
            (
                {"logit_bias": {3: 1.0}},
                {"allowed_token_ids": range(9)},
                {"bad_words": ["1", "2 3"]},
                {"repetition_penalty": 2.0},
                {"presence_penalty": 1.0, "frequency_penalty": -1.0},
                {"prompt_logprobs": 2},
                {"prompt_logprobs": 0, "logprobs": 1, "min_tokens": 1},
                {"stop": "9 ", "include_stop_str_in_output": True},
            )
        )
    ]
    for i in range(160):
        prompt = rng.integers(0, 97, size=rng.integers(1, 29)).tolist()
        params = dataclasses.replace(
            variants[i % len(variants)], max_tokens=int(rng.integers(1, 12))
        )
        warm_engine.add_request(f"{launches}/{i}", prompt, params)
        for _ in range(rng.integers(0, 3)):
            warm_engine.step()
    while warm_engine.has_unfinished_requests():
        warm_engine.step()
    assert warm_engine.stats()["compiles"] == before
    assert warm_engine.stats()["restored_blocks"] > 0


def test_every_total_has_a_listed_shape(warm_engine: Engine) -> None:
    shape = warm_engine.shape
    listed = set(shape.launch_shapes())
    for rows in range(1, CONFIG.max_num_seqs + 1):
        for tokens in range(rows, CONFIG.max_num_batched_tokens + 1):
            r, t = shape.launch_shape(rows, tokens)
            assert (r, t) in listed and r >= rows and t >= tokens
    assert shape.launch_shape(3, 0) in listed


def test_the_largest_bucket_is_the_budget() -> None:
    assert bucket(37, CONFIG.shape(13).token_buckets) == 37
    with pytest.raises(ValueError, match="38 exceeds the largest bucket"):
        bucket(38, CONFIG.shape(13).token_buckets)
