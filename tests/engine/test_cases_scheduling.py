"""Faults of other engines in scheduling and N-step decoding, as cases.

Each test is the case with its numbers, then its kind: other block sizes, launches in
flight and steps a launch.
"""

from __future__ import annotations

import pytest

from jaxserve.scheduling.policies import fcfs
from tests.engine.harness import (
    BLOCK_SIZES,
    EVERY_KIND,
    EXECUTORS,
    JAX,
    JAX_4_STEPS,
    R_5_TO_9,
    SCHEDULES,
    Served,
    by_priority,
    config,
    preempt,
)
from tests.serving import direct


def prefills(served: Served) -> list[list[int]]:
    """Prompt tokens of each row of each launch that computed any, in rank order."""
    rows = [[n for _, n, _ in e.data["slots"] if n] for e in served.of("launch")]
    return [row for row in rows if row]


@pytest.mark.parametrize("first", ["L", "H"])
def test_sc3_the_victim_is_not_in_the_batch(first: str) -> None:
    """SC3 (vllm#23347): a request already put in this step's batch was the victim."""
    served = Served(config(4, 1, 1, num_blocks=4), policy=by_priority())
    jobs = {"L": ([1] * 7, 10), "H": ([2] * 7, 0)}
    for name in (first, "L" if first == "H" else "H"):
        prompt, priority = jobs[name]
        served.add(name, prompt, 3, priority=priority)
    served.step()
    served.step()
    assert len(served.tokens("H")) == len(served.tokens("L")) == 2
    assert served.stats()["free_blocks"] == 0
    served.step()  # both need a third block
    plan = served.recorder.plans[-1]
    rows = [slot for slot in plan.decode[:, 0].tolist() if slot < 2]
    assert len(rows) == 1 and not plan.chunk_end.any()
    assert served.of("launch")[-1].data["decode_tokens"] == 1
    assert plan.release[:1].tolist() != rows  # who runs is not who was released
    assert served.tokens("H") == [85, 86, 33]
    assert served.stats()["preemptions"] == 1 and served.stats()["waiting"] == 1
    assert served.of("preempted")[0].request_id == "L"
    assert served.free() == 1  # H's three; L holds none
    served.finish()
    assert served.tokens("L") == [89, 80, 23]
    assert served.stats()["preemptions"] == 1


@pytest.mark.parametrize(("b", "launches", "steps"), EVERY_KIND)
def test_sc3_of_every_kind(b: int, launches: int, steps: int) -> None:
    """SC3: whatever the order of arrival, the least is the one that gives way."""
    served = Served(
        config(b, launches, steps, num_blocks=7, max_num_seqs=3), policy=by_priority()
    )
    prompts = {"0": [2] * (2 * b - 1), "1": [1] * (2 * b), "2": [3] * (2 * b - 1)}
    for name in ("2", "0", "1"):
        served.add(name, prompts[name], 5 * b, priority=int(name))
    served.finish()
    running = set()
    for event in served.events:
        if event.kind == "admitted":
            running.add(event.request_id)
        elif event.kind == "preempted":
            assert event.request_id == max(running) != "0"
        if event.kind in ("preempted", "finished"):
            running.discard(event.request_id)
    assert served.of("preempted")
    ends = [e.request_id for e in served.of("finished")]
    assert ends == sorted(ends)
    for name, prompt in prompts.items():
        assert served.tokens(name) == direct(prompt, 5 * b)
        assert served.reason(name) == "length"


@pytest.mark.parametrize(("b", "launches", "steps"), EVERY_KIND)
def test_sc5_who_waits_for_anothers_prefill_keeps_its_place(
    b: int, launches: int, steps: int
) -> None:
    """SC5 (vllm#27441, #33522): skipped requests were put back in reverse."""
    prompt = [(3 * i) % 97 for i in range(8 * b)]
    served = Served(
        config(
            b,
            launches,
            steps,
            max_chunk_tokens=b,
            max_num_batched_tokens=2 * b + 8,
            max_num_seqs=5,
            num_blocks=80,
            max_model_len=128,
        )
    )
    served.add("r0", prompt, 1)
    served.step()
    served.add("r1", [*prompt, 1], 2)
    served.add("r2", [*prompt, 2], 2)
    served.add("r3", [50], 2)
    served.step()
    assert [e.request_id for e in served.of("admitted")] == ["r0", "r3"]
    served.add("r4", [51], 2)
    served.add("r5", [52], 2)
    served.finish()
    order = [e.request_id for e in served.of("admitted")]
    assert order.index("r1") < order.index("r2")
    assert order.index("r4") < order.index("r1")  # who can run is not held up
    one, two = (served.of("admitted", name)[0] for name in ("r1", "r2"))
    assert one.time_s == two.time_s  # ready in the same plan
    # Neither computed what r0 did: a burst with one prefix computes it once.
    assert one.data["cached_tokens"] == two.data["cached_tokens"] == 8 * b
    for name, tail in (("r1", 1), ("r2", 2)):
        assert served.tokens(name) == direct([*prompt, tail], 2)


def test_sc5_a_burst_with_one_prefix_computes_it_once() -> None:
    """SC5, and PC: six prompts at once; each waits one plan, then hits."""
    served = Served(config(4, 1, 1, num_blocks=64, max_num_seqs=6))
    prompt = list(range(16))
    for i in range(6):
        served.add(f"{i}", [*prompt, 20 + i], 2)
    served.finish()
    assert [e.data["cached_tokens"] for e in served.of("admitted")] == [0] + [16] * 5
    assert prefills(served) == [[17], [1] * 5]


@pytest.mark.parametrize(("launches", "steps"), SCHEDULES)
def test_sc7_a_preempted_request_is_not_re_sorted_to_the_back(
    launches: int, steps: int
) -> None:
    """SC7 (ROCm/ATOM#2158): equal lengths are FCFS, and the victim goes before them."""
    shortest = fcfs()._replace(
        rank=lambda state, view, now_s: (view.priority, (view.prompt_tokens,))
    )
    served = Served(
        config(4, launches, steps, max_num_seqs=1, num_blocks=64), policy=shortest
    )
    served.add("a", [1] * 6, 12)
    served.until(lambda: len(served.tokens("a")) >= 2)
    for name in ("b", "c", "d"):
        served.add(name, [ord(name) % 97] * 6, 3)
    served.add("short", [8] * 2, 3)
    preempt(served)
    served.finish()
    order = [e.request_id for e in served.of("admitted")]
    order = [name for name in order if name and not name.startswith("urgent")]
    assert order == ["a", "short", "a", "b", "c", "d"]
    assert served.tokens("a") == direct([1] * 6, 12)


@pytest.mark.parametrize(("launches", "steps"), SCHEDULES)
def test_sc9_chunks_share_the_budget(launches: int, steps: int) -> None:
    """SC9 (sglang-jax#1328): the budget looked at the un-chunked length."""
    served = Served(
        config(
            4,
            launches,
            steps,
            num_blocks=32,
            max_num_batched_tokens=16,
            max_chunk_tokens=8,
        )
    )
    for i in range(2):
        served.add(f"{i}", [10 + i] * 20, 1)
    served.finish()
    assert prefills(served) == [[8, 8], [8, 8], [4, 4]]


@pytest.mark.parametrize(("launches", "steps"), SCHEDULES)
def test_sc9_the_budget_counts_what_is_computed(launches: int, steps: int) -> None:
    """SC9 (TensorRT-LLM#12665): cache hits were not, or wrongly, in the budget."""
    served = Served(
        config(
            4,
            launches,
            steps,
            num_blocks=32,
            max_num_seqs=4,
            max_num_batched_tokens=16,
        )
    )
    prompts = [[20 + i] * 12 for i in range(3)]
    for i, prompt in enumerate(prompts):
        served.run(f"warm {i}", prompt[:8], 1)
    before = len(served.of("launch"))
    for i, prompt in enumerate(prompts):
        served.add(f"{i}", prompt, 1)
    served.add("uncached", [40] * 8, 1)
    served.finish()
    assert [served.outputs[f"{i}"].num_cached_tokens for i in range(3)] == [8] * 3
    assert prefills(served)[-2:] == [[4, 4, 4, 4], [4]]
    for event in served.of("launch")[before:]:
        data = event.data
        assert data["prefill_tokens"] + data["decode_rows"] <= 16


@pytest.mark.parametrize("executor", EXECUTORS)
def test_jx7_a_window_ends_with_the_request(executor: str) -> None:
    """JX7 (tenstorrent/vllm#123, vllm#27922): N steps ran on after max_tokens."""
    served = Served(JAX_4_STEPS, executor=EXECUTORS[executor])
    served.run("r", range(5, 10), 6)
    assert served.tokens("r") == R_5_TO_9[:6]
    launches = [e.data for e in served.of("launch") if e.data["token_bucket"]]
    assert [x["steps"] for x in launches] == [4, 2]  # the prefill, then 5 decode steps
    assert [x["decode_tokens"] for x in launches] == [4, 2]
    # 8 rows, then 10: never the 13 of two whole windows.
    assert [JAX.num_blocks - n for n in served.free_planned[:2]] == [2, 3]


def test_jx7_who_arrives_in_a_window_starts_right_after_it() -> None:
    """JX7: and the window ends as soon as nobody runs in it."""
    served = Served(config(4, 1, 4, num_blocks=64))
    served.add("r", range(5, 10), 6)
    # The prefill's window ends at 15 + 3 x 11 = 48 ms, the next one of 2 at 70 ms.
    served.add("mid", [1, 2], 1, arrival_time=0.050)
    served.finish()
    assert served.outputs["r"].metrics.token_times_s == pytest.approx(
        [0.048] * 4 + [0.070] * 2
    )
    assert served.of("admitted", "mid")[0].time_s == pytest.approx(0.070)
    assert served.outputs["mid"].metrics.ttft_s == pytest.approx(0.070 + 0.012 - 0.050)


@pytest.mark.parametrize("b", BLOCK_SIZES)
@pytest.mark.parametrize("steps", [1, 2, 4, 8])
@pytest.mark.parametrize("launches", [1, 2, 3])
def test_jx7_of_every_kind(b: int, steps: int, launches: int) -> None:
    """JX7: no step, row or block beyond the request, at every length of output."""
    for max_tokens in (1, 2, steps, steps + 1, 2 * steps + 1):
        served = Served(config(b, launches, steps, num_blocks=64))
        served.run("r", [4] * 5, max_tokens)
        assert served.tokens("r") == direct([4] * 5, max_tokens)
        assert served.stats()["steps"] == max_tokens
        rows = 5 + max_tokens - 1
        assert 64 - min(served.free_planned) == -(-rows // b)
