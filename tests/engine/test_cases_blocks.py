"""Faults of other engines in block accounting, as cases.

Each test is the case with its numbers, then its kind: other block sizes, launches in
flight and steps a launch.
"""

from __future__ import annotations

import dataclasses

import pytest

from jaxserve.executors.jax_executor import JaxExecutor
from tests.engine.harness import (
    EVERY_KIND,
    EXECUTORS,
    JAX,
    SIM_C,
    URGENT,
    Served,
    by_priority,
    config,
    jax_executor,
    preempt,
)
from tests.serving import direct


def chunk_positions(served: Served, since: int) -> list[int]:
    """Positions of the prompt tokens in plans from number `since` on, but urgent's."""
    return [
        position
        for plan in served.recorder.plans[since:]
        for slot, position, token in plan.chunk.tolist()
        if slot < served.engine.shape.max_slots and (position, token) != (0, URGENT)
    ]


def test_ba1_a_refused_admission_leaves_nothing_pinned() -> None:
    """BA1 (vllm#11565): pins of a failed admission stayed, and the pool shrank."""
    served = Served(config(4, 1, 1, num_blocks=6))
    x = list(range(1, 13))
    served.run("X", x, 1)
    assert served.free() == 6 and served.stats()["idle_cached_blocks"] == 3
    served.add("H", range(60, 71), 2)
    served.step()
    served.add("Y", [*x, *range(40, 48)], 2)
    served.step()  # 3 of 5 blocks are hits, but 2 more are not to be had
    assert not served.of("admitted", "Y") and served.stats()["waiting"] == 1
    assert served.free() == 3
    assert served.stats()["idle_cached_blocks"] == 3  # refcounts 0, and findable
    served.finish()
    (admitted,) = served.of("admitted", "Y")
    assert admitted.data["cached_tokens"] == 12
    assert admitted.data["context_tokens"] - 12 == 8
    assert served.tokens("Y") == [88, 32]
    assert served.free() == 6


@pytest.mark.parametrize(("b", "launches", "steps"), EVERY_KIND)
def test_ba1_of_every_kind(b: int, launches: int, steps: int) -> None:
    """BA1: three blocks of hits, two more needed, and less than two to be had."""
    served = Served(config(b, launches, steps, num_blocks=6))
    x = [i % 97 for i in range(1, 3 * b + 1)]
    served.run("X", x, 1)
    h = [60 + i for i in range(max(3 * b - 1, 3))]
    served.add("H", h, 3 * b - len(h) + 1)  # 3 blocks in all
    served.add("Y", y := x + [40 + i for i in range(2 * b)], 2)
    served.step()
    assert served.of("admitted", "H") and not served.of("admitted", "Y")
    assert served.stats()["idle_cached_blocks"] == 3
    assert served.free() == 3
    served.finish()
    assert served.of("admitted", "Y")[0].data["cached_tokens"] == 3 * b
    assert served.tokens("Y") == direct(y, 2)
    assert served.free() == 6
    served.engine.reset_prefix_cache()
    assert served.stats()["free_blocks"] == 6


@pytest.mark.parametrize("executor", EXECUTORS)
def test_ba3_the_run_range_follows_the_lookup(executor: str) -> None:
    """BA3 (nano-vllm#211): the range of tokens was fixed before the prefix lookup."""
    served = Served(JAX, policy=by_priority(), executor=EXECUTORS[executor])
    served.add("r", range(11, 17), 8)
    for i in range(8):  # they hold the other slots, so that one more displaces r
        served.add(f"mate {i}", [i], 40, priority=-1)
    served.until(lambda: len(served.tokens("r")) == 3)
    assert served.tokens("r") == [32, 28, 66]
    plans = len(served.recorder.plans)
    preempt(served)
    assert served.of("preempted", "r")[0].data["lost_tokens"] == 8
    served.until(lambda: len(served.tokens("r")) > 3)
    resumed = served.of("admitted", "r")[1].data
    assert resumed["cached_tokens"] == 8 and resumed["context_tokens"] == 9
    assert not resumed["first"]
    assert chunk_positions(served, plans) == [8]
    assert served.tokens("r")[3] == 46
    served.finish()
    assert served.tokens("r") == [32, 28, 66, 46, 16, 95, 7, 22]


@pytest.mark.parametrize(("b", "launches", "steps"), EVERY_KIND)
def test_ba3_of_every_kind(b: int, launches: int, steps: int) -> None:
    """BA3: after any preemption the run is exactly what the cache does not hold."""
    for after in (1, 2, 5, 9):
        served = Served(
            config(b, launches, steps, max_num_seqs=1, num_blocks=64),
            policy=by_priority(),
        )
        served.add("r", range(11, 17), 24)
        served.until(lambda: len(served.tokens("r")) >= after)  # noqa: B023
        plans = len(served.recorder.plans)
        preempt(served)
        served.finish()
        _, resumed = served.of("admitted", "r")
        context, cached = (
            resumed.data["context_tokens"],
            resumed.data["cached_tokens"],
        )
        # Rows whose tokens were read at the preemption are named; nothing evicts.
        (lost,) = served.of("preempted", "r")
        read = [e for e in served.of("progressed", "r") if e.time_s <= lost.time_s]
        rows = 6 + sum(e.data["output_tokens"] for e in read) - 1
        assert cached == min(rows, context - 1) // b * b
        assert chunk_positions(served, plans) == list(range(cached, context))
        assert served.stats()["recomputed_tokens"] == context - cached
        assert served.tokens("r") == direct(list(range(11, 17)), 24)


def test_jx3_a_device_of_other_size_is_found_before_it_answers() -> None:
    """JX3 (tpu-inference#2366): ids past the array were clamped, and rows overwrote.

    The scheduler is told of a block more than there are.
    """

    def device(model, params, shape):
        return JaxExecutor(model, params, JAX.shape(64), cost=SIM_C)

    served = Served(dataclasses.replace(JAX, num_blocks=65), executor=device)
    served.add("r", [1, 2], 2)
    with pytest.raises(RuntimeError, match=r"num_free.*free = P - slots - handles"):
        served.finish()
    assert not served.outputs


def test_jx3_a_full_pool_gives_the_outputs_of_an_empty_one() -> None:
    """JX3: every block of the real pool in use, by requests that share and do not."""
    served = Served(JAX, executor=jax_executor())
    jobs = {f"{i}": [i, *range(20, 20 + 3 * i)] for i in range(1, 10)}
    lowest = JAX.num_blocks
    for name, prompt in jobs.items():
        served.add(name, prompt, 48 - len(prompt))  # 9 x 12 blocks wanted, 64 there
    while served.engine.has_unfinished_requests():
        served.step()
        lowest = min(lowest, served.recorder.outputs[-1].num_free)
    assert lowest == 0 and served.stats()["preemptions"] > 0
    for name, prompt in jobs.items():
        assert served.tokens(name) == direct(prompt, 48 - len(prompt))


def test_sc1_a_request_that_can_never_fit_is_refused_at_once() -> None:
    """SC1 (vllm#39734, kestrel#135): it sat at the head of the queue for ever."""
    served = Served(config(4, 1, 1, num_blocks=4))
    with pytest.raises(ValueError, match=r"20 tokens.*4 KV blocks.*16"):
        served.add("too long", range(20), 4)
    assert served.run("next", [2, 7, 1], 4).outputs[0].token_ids == [29, 56, 54, 80]
    served.run("ends early", range(10), 50)
    assert served.tokens("ends early") == direct(range(10), 7)  # 16 - 10 + 1
    assert served.reason("ends early") == "length"


@pytest.mark.parametrize(("b", "launches", "steps"), EVERY_KIND)
def test_sc1_of_every_kind(b: int, launches: int, steps: int) -> None:
    """SC1: never idle with work waiting, on both sides of what fits."""
    served = Served(config(b, launches, steps, num_blocks=4))
    rows = 4 * b
    with pytest.raises(ValueError, match=rf"{rows + 1} tokens.*{rows}"):
        served.add("one too many", [3] * (rows + 1), 1)
    expected = {}
    for tokens in (rows, rows - 1, 1):
        prompt = [(5 * tokens + i) % 97 for i in range(tokens)]
        served.add(f"{tokens}", prompt, None)
        limit = min(64 - tokens, rows - tokens + 1)
        expected[f"{tokens}"] = direct(prompt, limit)
    served.finish()
    assert {name: served.tokens(name) for name in expected} == expected
    assert {served.reason(name) for name in expected} == {"length"}
