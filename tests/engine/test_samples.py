"""Several samples of one request: the prompt is computed once, and each ends alone."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from jaxserve import SamplingParams
from tests.engine.harness import (
    EVERY_KIND,
    EXECUTORS,
    JAX,
    Served,
    by_priority,
    config,
    preempt,
)
from tests.serving import direct, sampled

PROMPT = [5, 6, 7, 8, 9, 10, 11]


def _al3(prompt: list[int]) -> tuple[int, tuple[int, ...]]:
    """A seed and stop ids under which samples 0, 1, 2 end after 2, 5 and 9 tokens."""
    for seed in itertools.count():
        outputs = [sampled(prompt, [], 9, seed, i) for i in range(3)]
        ids = {outputs[0][1], outputs[1][4], outputs[2][8]}
        ends = [
            next((k + 1 for k, t in enumerate(output) if t in ids), 0)
            for output in outputs
        ]
        if ends == [2, 5, 9]:
            return seed, tuple(sorted(ids))
    raise AssertionError


def _params(seed: int, n: int, tokens: int, **more) -> dict:
    return {"n": n, "temperature": 1.0, "seed": seed, "max_tokens": tokens, **more}


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("caching", [True, False])
def test_al3_samples_end_on_their_own(executor: str, caching: bool) -> None:
    """AL3 (vllm#14326, #14512): children that ended at different times were
    mishandled."""
    seed, ids = _al3(PROMPT)
    shape = dataclasses.replace(JAX, enable_prefix_caching=caching)
    served = Served(shape, executor=EXECUTORS[executor])
    params = SamplingParams(**_params(seed, 3, 50, stop_token_ids=ids))
    served.engine.add_request("r", PROMPT, params)
    ended: list[list[str | None]] = []
    finished = 0
    while served.engine.has_unfinished_requests():
        for output in served.engine.step():
            assert [o.index for o in output.outputs] == [0, 1, 2]
            ended.append([o.finish_reason for o in output.outputs])
            finished += output.finished
            lengths = [len(o.token_ids) for o in output.outputs]
    assert finished == 1 and lengths == [2, 5, 9]
    assert ended[-1] == ["stop"] * 3 and ended[-2] == ["stop", "stop", None]
    for i, completion in enumerate(output.outputs):
        assert completion.token_ids == sampled(PROMPT, [], lengths[i], seed, i)
        assert completion.stop_reason == completion.token_ids[-1]
    served.check_nothing_is_left()
    stats = served.stats()
    # The last token of the prompt is computed by each.
    assert stats["prefill_tokens"] == len(PROMPT) + 2
    assert stats["free_blocks"] + stats["cached_blocks"] == 64
    assert caching or stats["cached_blocks"] == 0


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("b", "launches", "steps"), EVERY_KIND)
def test_al3_abort_stops_every_sample(
    b: int, launches: int, steps: int, caching: bool
) -> None:
    """AL3 (vllm#14326): children went on to run, and a map grew for ever."""
    shape = config(
        b, launches, steps, num_blocks=99, max_num_seqs=3, enable_prefix_caching=caching
    )
    for when in range(5):
        served = Served(shape)
        params = SamplingParams(**_params(1, 5, 40))
        served.engine.add_request("r", PROMPT, params)
        for _ in range(when):
            served.engine.step()
        assert served.engine.abort_request("r")
        assert not served.engine.abort_request("r")
        outputs = []
        while served.engine.has_unfinished_requests():
            outputs += served.engine.step()
        assert [o.finished for o in outputs if o.request_id == "r"][-1]
        assert {c.finish_reason for c in outputs[-1].outputs} == {"abort"}
        served.check_nothing_is_left()
        stats = served.stats()
        assert stats["free_blocks"] + stats["cached_blocks"] == 99
        assert caching or stats["cached_blocks"] == 0


@pytest.mark.parametrize("mode", ["recompute", "swap", "disk"])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("kind", ["cumulative", "delta", "final_only"])
def test_each_is_what_it_is_alone(mode: str, caching: bool, kind: str) -> None:
    """Two slots for four samples, preempted on the way."""
    shape = config(
        4,
        1,
        1,
        num_blocks=64,
        enable_prefix_caching=caching,
        preemption_mode=mode,
        num_swap_blocks=40,
        num_disk_blocks=40,
    )
    served = Served(shape, policy=by_priority())
    params = SamplingParams(**_params(7, 4, 9, output_kind=kind))
    served.engine.add_request("r", PROMPT, params)
    told: dict[int, list[int]] = {i: [] for i in range(4)}
    outputs = []
    for step in itertools.count():
        outputs = [o for o in served.engine.step() if o.request_id == "r"]
        for completion in outputs[0].outputs if outputs else ():
            if kind == "delta":
                told[completion.index] += completion.token_ids
            else:
                told[completion.index] = completion.token_ids
        if outputs and outputs[0].finished:
            break
        assert not outputs or kind != "final_only"
        if step in (4, 9):
            served.outputs.pop("r", None)
            _displace(served, told, kind)
    for i in range(4):
        assert told[i] == sampled(PROMPT, [], 9, 7, i), i
    served.finish()
    assert served.stats()["preemptions"] >= 1


def _displace(served: Served, told: dict[int, list[int]], kind: str) -> None:
    """An urgent request takes a slot; outputs of "r" told meanwhile are kept."""
    served.engine.add_request(
        f"urgent {len(served.events)}",
        [90],
        SamplingParams(temperature=0.0, max_tokens=1),
        priority=-1,
    )
    done = False
    while not done:
        for output in served.engine.step():
            if output.request_id != "r":
                done = True
                continue
            for completion in output.outputs:
                if kind == "delta":
                    told[completion.index] += completion.token_ids
                else:
                    told[completion.index] = completion.token_ids


def test_unseeded_samples_differ_and_greedy_ones_do_not() -> None:
    served = Served(config(4, 1, 1, num_blocks=64, max_num_seqs=4))
    served.add("random", PROMPT, 8, n=4, temperature=1.0)
    served.finish()
    outputs = [tuple(o.token_ids) for o in served.outputs["random"].outputs]
    assert len(set(outputs)) == 4
    served.add("greedy", PROMPT, 8, n=2)
    served.finish()
    for output in served.outputs["greedy"].outputs:
        assert output.token_ids == direct(PROMPT, 8)


def test_the_first_sample_is_that_of_a_single_one() -> None:
    served = Served(config(4, 1, 1, num_blocks=64, max_num_seqs=4))
    served.add("three", PROMPT, 8, n=3, temperature=1.0, seed=11)
    served.add("one", PROMPT, 8, temperature=1.0, seed=11)
    served.finish()
    assert served.outputs["three"].outputs[0].token_ids == served.tokens("one")


def test_metrics_of_several_samples() -> None:
    served = Served(config(4, 1, 1, num_blocks=64, max_num_seqs=4))
    served.add("r", PROMPT, 5, n=3)
    served.finish()
    metrics = served.outputs["r"].metrics
    assert metrics.output_tokens == 15
    assert list(metrics.token_times_s) == sorted(metrics.token_times_s)
    assert metrics.finished_s == max(e.time_s for e in served.of("finished"))
    assert len(served.of("finished")) == 3


@pytest.mark.parametrize("batching", ["static", "continuous"])
def test_static_batching_serves_samples_too(batching: str) -> None:
    served = Served(config(4, 1, 1, num_blocks=64, batching=batching))  # two slots
    served.add("r", PROMPT, 6, n=3, temperature=1.0, seed=2)
    served.finish()
    for i, output in enumerate(served.outputs["r"].outputs):
        assert output.token_ids == sampled(PROMPT, [], 6, 2, i)


def test_urgent_ones_displace_samples() -> None:
    served = Served(config(4, 1, 1, num_blocks=64), policy=by_priority())
    served.add("r", PROMPT, 6)
    served.step()
    preempt(served)
    served.finish()
