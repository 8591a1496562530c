"""Faults of other engines in sampling, seeds and log-probabilities, as cases."""

from __future__ import annotations

import dataclasses

import pytest

from jaxserve import SamplingParams
from tests.engine.fixed_logits import Fixed
from tests.engine.harness import (
    JAX,
    Served,
    by_priority,
    config,
    jax_executor,
    preempt,
)
from tests.processing import Numbers, process
from tests.serving import Job, direct, direct_random, draw, hash_logits

STEPS = pytest.mark.parametrize("steps", [1, 4])


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


VALUES = {0: -0.4402, 1: -1.4402, 2: -2.4402, 3: -3.4402}


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


@pytest.mark.parametrize("mode", ["recompute", "swap", "disk"])
def test_sa5_logprobs_survive_preemption(mode: str) -> None:
    """SA5, PS3 (sglang#39645): as many entries as tokens, equal to the unpreempted.

    `Served.step` checks that each output extends the one before by something new.
    """

    def run(preemptions: int) -> tuple[list[int], list]:
        shape = dataclasses.replace(
            JAX, preemption_mode=mode, num_swap_blocks=20, num_disk_blocks=20
        )
        served = Served(shape, policy=by_priority(), executor=jax_executor())
        for i in range(8):
            served.add(f"mate {i}", [i], 40, priority=-1)
        served.add("r", range(11, 17), 6, logprobs=2)
        for count in (2, 4)[:preemptions]:
            served.until(lambda n=count: len(served.tokens("r")) == n)
            preempt(served)
        served.finish()
        ways = [event.data["mode"] for event in served.of("preempted", "r")]
        assert ways == [mode] * preemptions
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


FIELDS = {
    "repetition_penalty": 4.0,
    "frequency_penalty": -2.0,
    "presence_penalty": -1.0,
    "logit_bias": {40: 6.0},
    "bad_words": ["32", "66 46", "17 17"],
    "allowed_token_ids": range(10, 97),
    "prompt_logprobs": 1,
}


@pytest.mark.parametrize("mode", ["recompute", "swap", "disk"])
@pytest.mark.parametrize(("steps", "launches"), [(1, 1), (4, 2)])
def test_fields_see_the_whole_context_after_a_preemption(
    mode: str, steps: int, launches: int
) -> None:
    """Counts of prompt and output are there again, and scores are told once."""
    shape = dataclasses.replace(
        JAX,
        preemption_mode=mode,
        num_swap_blocks=20,
        num_disk_blocks=20,
        num_scheduler_steps=steps,
        launches_in_flight=launches,
        max_chunk_tokens=4,
    )
    job = Job(list(range(11, 29)), 18, seed=3, fields=FIELDS)
    served = Served(
        shape, policy=by_priority(), executor=jax_executor(), tokenizer=Numbers()
    )
    for i in range(8):
        served.add(f"mate {i}", [i], 40, priority=-1)
    served.engine.add_request("r", job.prompt, job.params)
    served.until(lambda: bool(served.of("admitted", "r")))
    preempt(served)  # in the middle of its prompt
    for count in (1, 8):
        served.until(lambda n=count: len(served.tokens("r")) >= n)
        preempt(served)
    served.finish()
    ways = [event.data["mode"] for event in served.of("preempted", "r")]
    assert len(ways) >= 2 and mode in ways
    assert served.tokens("r") == job.expected()
    assert served.tokens("r") != Job(job.prompt, 18, seed=3).expected()
    job.check_scores(served.outputs["r"])


@pytest.mark.parametrize("field", ["repetition_penalty", "presence_penalty"])
def test_penalties_see_what_the_prefix_cache_held(field: str) -> None:
    """A cached prefix is in no chunk of the request that finds it."""
    value = {"repetition_penalty": 9.0, "presence_penalty": -2.0}[field]
    prompt = [*range(20), 3, 4]
    served = Served(JAX, executor=jax_executor())
    served.run("first", prompt, 4)
    job = Job(prompt, 12, seed=1, fields={field: value})
    served.engine.add_request("r", job.prompt, job.params)
    served.finish()
    assert served.outputs["r"].num_cached_tokens == 20
    assert served.tokens("r") == job.expected()
    if field == "repetition_penalty":  # blind to the cached part, it draws another
        blind = Job(prompt[20:], 12, seed=1, fields={field: value})
        assert processed_without(blind, prompt) != job.expected()


def processed_without(blind: Job, prompt: list[int]) -> list[int]:
    """The output if the penalties saw only `blind.prompt` of the prompt."""
    out: list[int] = []
    while len(out) < blind.max_tokens:
        context = [*prompt, *out]
        penalties = (blind.fields["repetition_penalty"], 0.0, 0.0)
        logits = process(hash_logits(context), blind.prompt, out, penalties=penalties)
        out.append(draw(logits, blind.seed, len(context)))
    return out
