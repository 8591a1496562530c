"""Faults of other engines in limits, bad input, fields and compiles, as cases."""

from __future__ import annotations

import pytest

from jaxserve import EngineConfig, SamplingParams
from tests.engine.fixed_logits import Fixed
from tests.engine.harness import (
    JAX,
    JAX_4_STEPS,
    SCHEDULES,
    Served,
    config,
    jax_executor,
)
from tests.engine.test_cases_sampling import seeded_alone, serve_seeded
from tests.serving import direct


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
    assert len(shape.launch_shapes()) == 5
    assert compiled == 5 + 2  # a fork, and a slot's tables
    mixes = [
        {"temperature": t, "logprobs": n, "presence_penalty": p}
        for t in (0.0, 1.0)
        for n in (None, 2)
        for p in (0.0, 1.0)
    ]
    for total in range(1, 318):
        served.engine.add_request(
            f"{total}",
            [total % 97] * total,
            SamplingParams(max_tokens=1, **mixes[total % 8]),
        )
        served.finish()
    for i in range(64):  # and mixed with one another
        params = SamplingParams(max_tokens=5, **mixes[i % 8])
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
