"""Faults of other engines in preemption, its metrics, and aborts, as cases.

Each test is the case with its numbers, then its kind: other block sizes, launches in
flight and steps a launch.
"""

from __future__ import annotations

import dataclasses

import pytest

from jaxserve import metrics
from tests.engine.harness import (
    EVERY_KIND,
    EXECUTORS,
    JAX,
    R_5_TO_9,
    SCHEDULES,
    Served,
    by_priority,
    config,
    preempt,
    preempt_at_every_output,
)
from tests.serving import direct

MODES = ["recompute", "swap", "disk"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("executor", EXECUTORS)
def test_ps1_preempted_twice_the_output_is_whole(executor: str, mode: str) -> None:
    """PS1 (vllm#16832, #5349): output incomplete, or taken for prompt, afterwards."""
    served = Served(
        dataclasses.replace(
            JAX, preemption_mode=mode, num_swap_blocks=64, num_disk_blocks=64
        ),
        policy=by_priority(),
        executor=EXECUTORS[executor],
    )
    served.add("r", range(5, 10), 8)
    for i in range(8):  # they hold the other slots, so that one more displaces r
        served.add(f"mate {i}", [i], 24, priority=-1)
    for outputs in (3, 6):
        served.until(lambda n=outputs: len(served.tokens("r")) == n)
        preempt(served)
        assert served.tokens("r") == R_5_TO_9[:outputs]
    served.finish()
    assert [e.data["mode"] for e in served.of("preempted", "r")] == [mode] * 2
    assert served.tokens("r") == R_5_TO_9
    assert served.reason("r") == "length"
    (finished,) = served.of("finished", "r")
    assert finished.data["prompt_tokens"] == 5 and finished.data["output_tokens"] == 8
    stats = served.stats()
    for way in ("swap", "disk"):
        assert stats[f"preemptions_by_{way}"] == (2 if mode == way else 0)
    assert (stats["recomputed_tokens"] == 0) == (mode != "recompute")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("b", "launches", "steps"), EVERY_KIND)
def test_ps1_of_every_kind(
    b: int, launches: int, steps: int, caching: bool, mode: str
) -> None:
    """PS1: preempted as often as it can be, in prompt, output and flight. By swap or
    disk no token is computed twice."""
    served = Served(
        config(
            b,
            launches,
            steps,
            max_num_seqs=1,
            num_blocks=64,
            max_chunk_tokens=3,
            enable_prefix_caching=caching,
            preemption_mode=mode,
            num_swap_blocks=64,
            num_disk_blocks=64,
            tier_write="never",
        ),
        policy=by_priority(),
    )
    served.add("r", range(5, 15), 20)
    preempt_at_every_output(served)
    preempted = served.of("preempted", "r")
    assert {e.data["mode"] for e in preempted} == {mode}
    count = len(preempted)
    assert count >= 20 / (steps * launches)
    assert served.tokens("r") == direct(range(5, 15), 20)
    (finished,) = served.of("finished", "r")
    assert finished.data["prompt_tokens"] == 10
    assert finished.data["output_tokens"] == 20
    assert served.outputs["r"].metrics.preemptions == count
    progress = served.of("progressed", "r")
    assert sum(e.data["output_tokens"] for e in progress) == 20
    if mode != "recompute":
        assert sum(e.data["prompt_tokens"] for e in progress) == 10
        stats = served.stats()
        assert stats["recomputed_tokens"] == stats["lost_swaps"] == 0


def test_me1_a_resumption_is_no_hit() -> None:
    """ME1 (vllm#25787): resumed requests hit their own blocks and lifted the rate."""
    served = Served(
        config(4, 1, 1, max_num_seqs=1, num_blocks=64), policy=by_priority()
    )
    served.add("r", range(11, 17), 8)
    served.until(lambda: len(served.tokens("r")) == 3)
    preempt(served)
    served.finish()
    assert served.of("admitted", "r")[1].data["cached_tokens"] == 8
    stats = served.stats()
    assert stats["prefix_queries_tokens"] == 6 + 1  # the urgent one's prompt is 1
    assert stats["prefix_hits_tokens"] == 0
    assert stats["resumed_hits_tokens"] == 8  # the saving, apart
    assert stats["recomputed_tokens"] == 1
    assert served.outputs["r"].num_cached_tokens == 0
    summary = metrics.summary([e for e in served.events if e.request_id == "r"])
    assert summary["prompt_tokens"] == 6 and summary["prefix_hit_rate"] == 0
    assert metrics.summary(served.events)["prefix_hit_rate"] == 0


@pytest.mark.parametrize(("launches", "steps"), SCHEDULES)
def test_me1_of_every_kind(launches: int, steps: int) -> None:
    """ME1: hits are counted once, at the first admission, however it is served."""
    served = Served(
        config(4, launches, steps, max_num_seqs=1, num_blocks=64), policy=by_priority()
    )
    served.run("first", range(20), 1)
    served.add("r", range(18), 12)  # finds 16 of its 18
    preempted = preempt_at_every_output(served)
    assert served.of("preempted", "r")
    stats = served.stats()
    assert stats["prefix_queries_tokens"] == 20 + 18 + preempted
    assert stats["prefix_hits_tokens"] == 16
    assert served.outputs["r"].num_cached_tokens == 16


def test_me3_tokens_count_once() -> None:
    """ME3 (inference-sim#1091): made again, counted twice; the first, not at all."""
    served = Served(config(4, 1, 1, num_blocks=2))
    prompts = {"a": [3, 4], "b": [5, 6]}
    for name, prompt in prompts.items():
        served.add(name, prompt, 6)
    # 7 rows each: at the fifth, two blocks are too few, and b gives way to a.
    served.finish()
    (lost,) = served.of("preempted")
    assert lost.request_id == "b"
    made = [e.data["output_tokens"] for e in served.of("progressed", "b")]
    before = [e for e in served.of("progressed", "b") if e.time_s <= lost.time_s]
    assert len(before) == 3 and sum(made) == 6
    times = metrics.by_request(served.events)
    assert [len(times[name].itl_s) for name in prompts] == [5, 5]
    summary = metrics.summary(served.events)
    assert summary["output_tokens"] == 12
    end = max(e.time_s for e in served.of("finished"))
    assert summary["output_tokens_per_s"] == pytest.approx(12 / end)
    assert served.stats()["output_tokens"] == 12
    # 2 + 3 tokens again, but for what its own full block of 4 saved.
    assert (
        served.stats()["recomputed_tokens"] + served.stats()["resumed_hits_tokens"] == 5
    )
    for name, prompt in prompts.items():
        assert served.tokens(name) == direct(prompt, 6)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("launches", [1, 2, 3])
def test_al1_one_id_names_one_live_request(executor: str, launches: int) -> None:
    """AL1 (vllm#10583, #15041): two live requests of one id broke the engine."""
    served = Served(
        dataclasses.replace(JAX, launches_in_flight=launches),
        executor=EXECUTORS[executor],
    )
    served.add("r", [2, 7, 1], 40)
    for _ in range(5):
        served.step()
    with pytest.raises(ValueError, match=r"request_id='r' is in use"):
        served.add("r", [9], 5)
    served.step()
    got = served.tokens("r")
    assert got == direct([2, 7, 1], 40)[: len(got)] and len(got) >= 6 - launches
    # Abort with launches in flight, and reuse the id before they are read.
    assert served.engine.abort_request("r")
    assert not served.engine.abort_request("r")
    served.add("r", [3, 1, 4, 1], 5)
    first = served.step()
    ended = [o for o in first if o.finished]
    assert [o.outputs[0].finish_reason for o in ended] == ["abort"]
    assert ended[0].outputs[0].token_ids == got
    served.finish()
    assert served.tokens("r") == [90, 75, 62, 50, 49]
    assert served.stats()["dropped_tokens"] == launches - 1
    # And after it has finished.
    assert served.run("r", [2, 7, 1], 4).outputs[0].token_ids == [29, 56, 54, 80]
    served.engine.reset_prefix_cache()
    assert served.stats()["free_blocks"] == JAX.num_blocks


@pytest.mark.parametrize(("b", "launches", "steps"), EVERY_KIND)
def test_al1_an_abort_at_any_time_leaks_nothing(
    b: int, launches: int, steps: int
) -> None:
    """AL1, BA: before arrival, waiting, in its prompt, decoding, ending, preempted."""
    for when in range(14):
        served = Served(
            config(
                b,
                launches,
                steps,
                num_blocks=-(-24 // b),
                max_chunk_tokens=4,
                max_model_len=40,
            ),
        )
        served.add("mate", [7] * 6, 12)
        served.add("r", range(11), 6)
        served.add("late", range(11), 6, arrival_time=0.05)
        for _ in range(when):
            served.step()
        gone = [name for name in ("r", "late") if served.engine.abort_request(name)]
        served.add("r2", range(11), 4)
        served.finish()
        for name in gone:
            assert served.reason(name) == "abort"
            got = served.tokens(name)
            assert got == direct(range(11), 6)[: len(got)]
        assert served.tokens("mate") == direct([7] * 6, 12)
        assert served.tokens("r2") == direct(range(11), 4)
        served.engine.reset_prefix_cache()
        assert served.stats()["free_blocks"] == -(-24 // b)
        assert len(served.recorder.inner.free) == -(-24 // b)
