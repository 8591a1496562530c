"""Faults of other engines in sampling, log-probabilities and limits, as cases."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import Engine, EngineConfig, SamplingParams
from jaxserve.models.base import Batch, Pages, Params
from tests.engine.harness import (
    JAX,
    JAX_4_STEPS,
    Served,
    by_priority,
    jax_executor,
)
from tests.engine.test_cases_blocks import SCHEDULES, config, preempt
from tests.serving import direct, direct_random

VOCAB = 8


@dataclasses.dataclass(frozen=True)
class FixedLogits:
    """The same logits at every position, those of `params`; no KV worth the name."""

    eos_ids: tuple[int, ...] = ()

    @property
    def vocab_size(self) -> int:
        return VOCAB

    def page_shapes(
        self, num_blocks: int, block_size: int
    ) -> dict[str, jax.ShapeDtypeStruct]:
        return {"none": jax.ShapeDtypeStruct((num_blocks, block_size), jnp.int32)}

    def forward(
        self, params: Params, pages: Pages, batch: Batch
    ) -> tuple[jax.Array, Pages]:
        rows = batch.kv_lens.shape[0]
        return jnp.broadcast_to(params["logits"], (rows, VOCAB)), pages


MODEL = FixedLogits(eos_ids=(5, 6))
CONFIG = EngineConfig(
    max_model_len=48,
    max_num_seqs=4,
    max_num_batched_tokens=4,  # one token bucket, hence one program with steps
    block_size=4,
    num_blocks=48,
    max_logprobs=3,
)
STEPS = pytest.mark.parametrize("steps", [1, 4])


class Fixed:
    """An engine whose model always has the same logits; -inf past those given."""

    def __init__(self, logits: list[float], steps: int = 1, launches: int = 1):
        padded = [*logits, *[-np.inf] * (VOCAB - len(logits))]
        self.engine = Engine(
            MODEL,
            {"logits": jnp.array([padded], jnp.float32)},
            dataclasses.replace(
                CONFIG, num_scheduler_steps=steps, launches_in_flight=launches
            ),
        )

    def run(self, *requests: SamplingParams, prompt: int = 10) -> list:
        """Their completions, served together."""
        for i, params in enumerate(requests):
            self.engine.add_request(f"{i}", [1] * prompt, params)
        done = {}
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                done[output.request_id] = output.outputs[0]
        return [done[f"{i}"] for i in range(len(requests))]


# SA1 ----------------------------------------------------------------------------------

SEEDED = SamplingParams(temperature=1.0, seed=42, max_tokens=16)
SEEDED_PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def seeded_alone() -> list[int]:
    """The seeded request's tokens by the documented keys, without an engine."""
    return direct_random(SEEDED_PROMPT, 16, 42)


def serve_seeded(served: Served, mates: int, **more: object) -> list[int]:
    """Its tokens among unseeded mates, five before it and the rest after."""
    for i in range(min(mates, 5)):
        params = SamplingParams(temperature=1.5, max_tokens=10 + 3 * i)
        served.engine.add_request(f"mate {i}", [i] * (i + 1), params)
    served.engine.add_request("seeded", SEEDED_PROMPT, SEEDED)
    for i in range(5, mates):
        params = SamplingParams(temperature=0.5, max_tokens=20, top_k=5)
        served.engine.add_request(f"mate {i}", [i], params)
    served.finish()
    return served.tokens("seeded")


@pytest.mark.parametrize(
    ("mates", "fields"),
    [
        (0, {}),
        (7, {}),  # row 5 of 8
        (8, {}),  # nine rows: another bucket
        (7, {"num_scheduler_steps": 4}),
        (7, {"num_scheduler_steps": 4, "launches_in_flight": 2}),
        (0, {"max_chunk_tokens": 3}),  # the prompt in 3 chunks
        (7, {"launches_in_flight": 3, "max_chunk_tokens": 3}),
        (7, {"enable_prefix_caching": False}),
    ],
)
def test_sa1_a_seed_fixes_the_tokens(mates: int, fields: dict) -> None:
    """SA1 (vllm#51226, mlx-lm#1580): the seeded depended on mates, or on history."""
    served = Served(dataclasses.replace(JAX, **fields), executor=jax_executor())
    for _ in range(2):  # the second call, on a server with a history
        assert serve_seeded(served, mates) == seeded_alone()


@pytest.mark.parametrize("launches", [1, 3])
def test_sa1_through_preemptions(launches: int) -> None:
    """SA1: preempted in mid output, its stream goes on where it was."""
    served = Served(
        dataclasses.replace(JAX, launches_in_flight=launches),
        policy=by_priority(),
        executor=jax_executor(),
    )
    for i in range(8):
        served.add(f"mate {i}", [i], 40, priority=-1)
    served.engine.add_request("seeded", SEEDED_PROMPT, SEEDED)
    for count in (1, 6, 11):
        served.until(lambda n=count: len(served.tokens("seeded")) >= n)
        preempt(served)
    served.finish()
    assert len(served.of("preempted", "seeded")) == 3
    assert served.tokens("seeded") == seeded_alone()


def test_sa1_unseeded_requests_follow_engine_seed_and_order() -> None:
    """SA1: a run can be repeated, and no two requests share a stream."""

    def tokens(seed: int) -> list[list[int]]:
        served = Served(dataclasses.replace(JAX, seed=seed), executor=jax_executor())
        for i in range(3):
            params = SamplingParams(max_tokens=16)
            served.engine.add_request(f"{i}", SEEDED_PROMPT, params)
        served.finish()
        return [served.tokens(f"{i}") for i in range(3)]

    first, again, other = tokens(0), tokens(0), tokens(1)
    assert first == again
    assert len({tuple(t) for t in first + other}) == 6


# SA3, SA5, SA7 ------------------------------------------------------------------------


def test_sa3_tiny_temperatures_in_one_batch() -> None:
    """SA3 (vllm#2937, #1623, gemma#585): inf, NaN, empty output, always token 0."""
    greedy = [SamplingParams(temperature=t, max_tokens=12) for t in (0, 1e-6, 1e-40)]
    hot = SamplingParams(temperature=1.0, max_tokens=38, seed=3, ignore_eos=True)
    done = Fixed([1, 2, 3]).run(*greedy, hot)
    assert [c.token_ids for c in done[:3]] == [[2] * 12] * 3
    assert set(done[3].token_ids) == {0, 1, 2}
    sharp = [
        SamplingParams(max_tokens=12, **fields)
        for fields in (
            {"top_k": 0},
            {"top_k": 1000},
            {"top_p": 0.0},
            {"top_p": 1e-9},
        )
    ]
    done = Fixed([0, 100, 9]).run(*sharp)
    assert [c.token_ids for c in done] == [[1] * 12] * 4


@pytest.mark.parametrize("temperature", [1e30, 1e38, 1e39, 1e308])
def test_sa3_a_huge_temperature_is_refused_or_draws_what_may_be_drawn(
    temperature: float,
) -> None:
    """SA3, at the other end: no overflow in a plan, no NaN, and barred stays barred."""
    fields = {"max_tokens": 38, "min_tokens": 38, "stop_token_ids": [0]}
    try:
        params = SamplingParams(temperature=temperature, seed=1, **fields)
    except ValueError as error:
        assert f"temperature={temperature!r}" in str(error)
        return
    (done,) = Fixed([1, 2, 3, 4]).run(params)
    assert set(done.token_ids) == {1, 2, 3}


VALUES = {0: -0.4402, 1: -1.4402, 2: -2.4402, 3: -3.4402}


@STEPS
@pytest.mark.parametrize("top", [0, 1, 2, 3])
def test_sa5_logprobs_of_every_token(top: int, steps: int) -> None:
    """SA5 (vllm#36746): the sampled token twice among the top, or ranks shifted."""
    params = SamplingParams(temperature=3.0, seed=5, max_tokens=38, logprobs=top)
    (done,) = Fixed([9, 8, 7, 6], steps).run(params)
    assert set(done.token_ids) == {0, 1, 2, 3}
    assert done.logprobs is not None and len(done.logprobs) == len(done.token_ids)
    for token, entry in zip(done.token_ids, done.logprobs, strict=True):
        assert entry.keys() == {*range(top), token}
        assert {i: e.rank for i, e in entry.items()} == {i: i + 1 for i in entry}
        for i, e in entry.items():  # of the unscaled distribution
            assert e.logprob == pytest.approx(VALUES[i], abs=5e-5)


def test_sa5_logprobs_survive_preemption() -> None:
    """SA5, PS3 (sglang#39645): as many entries as tokens, equal to the unpreempted."""

    def run(preemptions: int) -> tuple[list[int], list]:
        served = Served(JAX, policy=by_priority(), executor=jax_executor())
        for i in range(8):
            served.add(f"mate {i}", [i], 40, priority=-1)
        served.add("r", range(11, 17), 6, logprobs=2)
        for count in (2, 4)[:preemptions]:
            served.until(lambda n=count: len(served.tokens("r")) == n)
            preempt(served)
        served.finish()
        assert len(served.of("preempted", "r")) == preemptions
        completion = served.outputs["r"].outputs[0]
        assert completion.logprobs is not None
        return completion.token_ids, completion.logprobs

    tokens, entries = run(2)
    assert tokens == [32, 28, 66, 46, 16, 95] and len(entries) == 6
    for token, entry in zip(tokens, entries, strict=True):
        assert entry[token].rank == 1 and len(entry) == 2
    assert (tokens, entries) == run(0)


@STEPS
@pytest.mark.parametrize("launches", [1, 2])
def test_sa7_min_tokens_bars_every_way_to_stop(steps: int, launches: int) -> None:
    """SA7 (TensorRT-LLM#12358, vllm#5849): min_tokens counted the prompt; with
    ignore_eos the last id of the vocabulary was barred."""
    # 5 > 6 > 2 > the rest, of which 7 is the last.
    logits = [0, 1, 3, 0.5, 0.2, 9, 8, 2]
    engine = Fixed(logits, steps, launches)
    greedy = SamplingParams(temperature=0.0, min_tokens=4, max_tokens=10)
    done = engine.run(
        greedy,
        dataclasses.replace(greedy, ignore_eos=True),
        dataclasses.replace(greedy, ignore_eos=True, stop_token_ids=[5]),
        dataclasses.replace(greedy, stop_token_ids=[2]),
    )
    assert [c.token_ids for c in done] == [
        [2, 2, 2, 2, 5],
        [5] * 10,
        [6, 6, 6, 6, 5],  # the user's own stop under ignore_eos; 6 is no stop then
        [7, 7, 7, 7, 5],
    ]
    assert [c.finish_reason for c in done] == ["stop", "length", "stop", "stop"]
    # The user's id is told; the model's own is not.
    assert [c.stop_reason for c in done] == [None, None, 5, None]
    (bar_all,) = engine.run(dataclasses.replace(greedy, min_tokens=10))
    assert bar_all.token_ids == [2] * 10 and bar_all.finish_reason == "length"


def test_sa7_through_a_preemption() -> None:
    """SA7: min_tokens counts output from the start, not from the resumption."""
    stop = direct(range(11, 17), 5)[4]
    for after in (1, 3):
        served = Served(
            config(4, 1, 1, max_num_seqs=1, num_blocks=32), policy=by_priority()
        )
        served.add("r", range(11, 17), 9, stop_token_ids=[stop], min_tokens=4)
        served.until(lambda s=served, n=after: len(s.tokens("r")) == n)
        preempt(served)
        served.finish()
        assert served.tokens("r") == direct(range(11, 17), 5)
        assert served.reason("r") == "stop"


# LI -----------------------------------------------------------------------------------


def test_li1_bad_input_leaves_the_running_alone() -> None:
    """LI1 (vllm#7746): an empty prompt killed the engine for everyone."""
    served = Served(JAX, executor=jax_executor())
    served.add("good", range(1, 10), 5)
    served.step()
    for bad, match in (([], "at least one token"), ("", "sequence of token ids")):
        with pytest.raises(ValueError, match=match):
            served.engine.add_request("bad", bad)
        served.step()
    served.finish()
    assert served.tokens("good") == [0, 66, 60, 39, 14]
    assert not served.of("arrived", "bad")


@pytest.mark.parametrize(("launches", "steps"), SCHEDULES)
def test_li3_limits_of_length(launches: int, steps: int) -> None:
    """LI3 (vllm#36789): a negative default of max_tokens in the message."""
    served = Served(config(4, launches, steps, max_model_len=16, num_blocks=64))
    with pytest.raises(ValueError, match=r"20 tokens.*max_model_len=16") as error:
        served.add("long", range(20), None)
    assert "-" not in str(error.value)
    with pytest.raises(ValueError, match=r"16 tokens.*max_model_len=16"):
        served.add("no room", range(16), None)
    for bad in (0, -1, 1.5):
        with pytest.raises(ValueError, match=f"max_tokens={bad} must be an integer"):
            SamplingParams(max_tokens=bad)  # type: ignore[arg-type]
    for prompt in (10, 15):
        served.run(f"{prompt}", range(prompt), None)
        assert served.tokens(f"{prompt}") == direct(range(prompt), 16 - prompt)
        assert served.reason(f"{prompt}") == "length"


@pytest.mark.parametrize(("launches", "steps"), SCHEDULES)
def test_li7_stop_or_length(launches: int, steps: int) -> None:
    """LI7 (llama.cpp#7381, mlx-vlm#2112): "stop" said when it was the limit."""
    served = Served(config(4, launches, steps, num_blocks=64), eos=(39, 96))
    # [1..9] -> 0, 66, 60, 39, 14: the end of sequence is the fourth.
    for limit, count, reason in (
        (2, 2, "length"),
        (3, 3, "length"),  # its next would have been the end
        (4, 4, "stop"),  # exactly at the limit
        (5, 4, "stop"),
    ):
        served.run(f"{limit}", range(1, 10), limit)
        assert served.tokens(f"{limit}") == [0, 66, 60, 39][:count]
        assert served.reason(f"{limit}") == reason
    served.run("ignored", range(1, 10), 5, ignore_eos=True)
    assert served.tokens("ignored") == [0, 66, 60, 39, 14]
    assert served.reason("ignored") == "length"
    served.run("own", range(1, 10), 5, ignore_eos=True, stop_token_ids=[60])
    assert served.tokens("own") == [0, 66, 60]
    assert served.outputs["own"].outputs[0].stop_reason == 60


def test_li7_each_field_changes_what_is_served() -> None:
    """LI7 (FastDeploy#4543): fields that were accepted and not passed on."""
    neutral = {"temperature": 1.0, "seed": 1, "max_tokens": 30, "ignore_eos": True}
    fields = [
        {"temperature": 0.0},
        {"top_k": 1},
        {"top_p": 0.1},
        {"min_p": 0.9},
        {"seed": 2},
        {"max_tokens": 3},
        {"ignore_eos": False},
        {"stop_token_ids": [0]},
        {"stop_token_ids": [0], "min_tokens": 20},
        {"logprobs": 1},
    ]
    logits = [2.0, 2.5, 1.0, 2.2, 2.1, 1.5, 1.5, 1.9]
    (base,) = Fixed(logits).run(SamplingParams(**neutral))
    assert len(base.token_ids) == 30 and 0 in base.token_ids
    assert base.finish_reason == "length" and base.logprobs is None
    seen = []
    for changed in fields:
        (done,) = Fixed(logits).run(SamplingParams(**{**neutral, **changed}))
        seen.append((tuple(done.token_ids), done.finish_reason, done.logprobs is None))
    assert (tuple(base.token_ids), "length", True) not in seen
    best = [1] * 30
    assert [list(tokens) for tokens, _, _ in seen[:4]] == [best] * 4
    first_zero = base.token_ids.index(0)
    assert seen[7][0] == tuple(base.token_ids[: first_zero + 1])
    assert len(seen[8][0]) >= 20 and 0 not in seen[8][0][:20]


# JX1 ----------------------------------------------------------------------------------


def test_jx1_nothing_compiles_after_warm_up() -> None:
    """JX1 (vllm#16726, #14310): the top bucket too large, first-time flags unwarmed."""
    served = Served(
        EngineConfig(
            max_model_len=320,
            max_num_seqs=8,
            max_num_batched_tokens=317,
            block_size=16,
            num_blocks=64,
            enable_prefix_caching=False,
            max_logprobs=2,
        ),
        executor=jax_executor(),
    )
    shape, executor = served.engine.shape, served.recorder.inner
    assert shape.launch_shape(1, 317) == (8, 317) == shape.launch_shapes()[-1]
    executor.warmup(iter)
    compiled = executor.compiles
    assert compiled == len(shape.launch_shapes()) == 4
    mixes = [{"temperature": t, "logprobs": n} for t in (0.0, 1.0) for n in (None, 2)]
    for total in range(1, 318):
        served.engine.add_request(
            f"{total}",
            [total % 97] * total,
            SamplingParams(max_tokens=1, **mixes[total % 4]),
        )
        served.finish()
    for i in range(64):  # and mixed with one another
        params = SamplingParams(max_tokens=5, **mixes[i % 4])
        served.engine.add_request(f"together {i}", [i] * (5 * i + 1), params)
    served.finish()
    assert executor.compiles == compiled
    totals = {e.data["prefill_tokens"] for e in served.of("launch")}
    assert totals >= set(range(1, 318))


def test_jx1_without_warm_up_no_more_than_the_listed_set_compiles() -> None:
    """JX1: a cold start compiles at most one program for each shape."""
    for base, mates in ((JAX, 8), (JAX_4_STEPS, 7)):
        served = Served(base, executor=jax_executor())
        assert serve_seeded(served, mates) == seeded_alone()
        shapes = {(plan.rows, plan.tokens) for plan in served.recorder.plans}
        assert shapes <= set(served.engine.shape.launch_shapes())
        assert served.stats()["compiles"] <= len(shapes)
