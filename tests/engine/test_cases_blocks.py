"""Faults of other engines in block accounting and the prefix cache, as cases.

Each test is the case with its numbers, then its kind: other block sizes, launches in
flight and steps a launch.
"""

from __future__ import annotations

import dataclasses

import pytest

from jaxserve import EngineConfig
from jaxserve.executors.jax_executor import JaxExecutor
from tests.engine.harness import JAX, SIM_C, Served, by_priority, jax_executor
from tests.serving import direct

BLOCK_SIZES = (1, 2, 4, 8)
SCHEDULES = ((1, 1), (2, 1), (3, 1), (1, 4), (2, 4))  # launches in flight, steps
EVERY_KIND = [(b, n, k) for b in BLOCK_SIZES for n, k in SCHEDULES]
EXECUTORS = {"definition": None, "device": jax_executor()}


def config(block_size: int, launches: int, steps: int, **fields) -> EngineConfig:
    """A small engine; a budget that holds any prompt here whole."""
    return EngineConfig(
        **{
            "block_size": block_size,
            "launches_in_flight": launches,
            "num_scheduler_steps": steps,
            "max_model_len": 64,
            "max_num_seqs": 2,
            "max_num_batched_tokens": 64,
            "max_logprobs": 0,
            **fields,
        }
    )


URGENT = 90


def preempt(served: Served) -> None:
    """Displace whoever runs by an urgent request, on an engine without a free slot."""
    name = f"urgent {len(served.events)}"
    served.add(name, [URGENT], 1, priority=-1)
    served.until(lambda: bool(served.tokens(name)))


def chunk_positions(served: Served, since: int) -> list[int]:
    """Positions of the prompt tokens in plans from number `since` on, but urgent's."""
    return [
        position
        for plan in served.recorder.plans[since:]
        for slot, position, token in plan.chunk.tolist()
        if slot < served.engine.shape.max_slots and (position, token) != (0, URGENT)
    ]


# Block accounting ---------------------------------------------------------------------


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


# Prefix cache -------------------------------------------------------------------------


@pytest.mark.parametrize("executor", EXECUTORS)
def test_pc1_a_prompt_of_whole_blocks(executor: str) -> None:
    """PC1 (nano-vllm#144, vllm#11186): all cached left nothing to run; then a fix broke
    the chain."""
    served = Served(JAX, executor=EXECUTORS[executor])
    prompt = list(range(1, 9))
    outputs = [served.run(f"{i}", prompt, 5) for i in range(3)]
    assert [o.num_cached_tokens for o in outputs] == [0, 4, 4]
    assert [o.outputs[0].token_ids for o in outputs] == [[79, 70, 75, 57, 77]] * 3
    longer = served.run("longer", [*prompt, 79, 70, 75, 57, 77], 2)
    assert longer.num_cached_tokens == 12


@pytest.mark.parametrize(("b", "launches", "steps"), EVERY_KIND)
def test_pc1_of_every_kind(b: int, launches: int, steps: int) -> None:
    """PC1: prompts of k whole blocks; decode-filled blocks are found as well."""
    served = Served(config(b, launches, steps, num_blocks=64))
    for blocks in (1, 2, 5):
        prompt = [(7 * blocks + i) % 97 for i in range(blocks * b)]
        expected = direct(prompt, b + 1)
        for run in range(3):
            output = served.run(f"{blocks} {run}", prompt, b + 1)
            assert output.outputs[0].token_ids == expected
            assert output.num_cached_tokens == (b * (blocks - 1) if run else 0)
        longer = served.run(f"{blocks} longer", prompt + expected, 1)
        filled = blocks + 1  # the last block holds b outputs; it is full at the end
        if launches == 1:
            assert longer.num_cached_tokens == filled * b
        # With launches in flight its tokens are read after it was given up: a loss.
        assert longer.num_cached_tokens >= blocks * b


@pytest.mark.parametrize(("b", "launches", "steps"), EVERY_KIND)
def test_pc1_what_fitted_once_fits_again(b: int, launches: int, steps: int) -> None:
    """PC1, BA1: a request that fills every block, again with its blocks still cached.

    A fully cached prompt computes its last block anew beside the cached one; both must
    not be kept from the request that needs the room.
    """
    served = Served(config(b, launches, steps, num_blocks=4))
    prompt = [i % 97 for i in range(1, 2 * b + 1)]
    for run in range(3):
        output = served.run(f"{run}", prompt, 2 * b + 1)  # 4 b rows: all four blocks
        assert output.outputs[0].token_ids == direct(prompt, 2 * b + 1)
        assert output.outputs[0].finish_reason == "length"


def test_pc1_a_duplicate_pins_no_memory() -> None:
    """PC1: who computes cached blocks again holds no more than without a cache."""
    held = {}
    for caching in (False, True):
        served = Served(config(4, 1, 1, num_blocks=32, enable_prefix_caching=caching))
        prompt = list(range(1, 9))
        served.run("first", prompt, 17)
        served.add("again", prompt, 17)
        served.until(lambda: len(served.tokens("again")) == 16)  # noqa: B023
        held[caching] = 32 - served.free()
    assert held[False] == 6  # 8 + 15 rows
    assert held[True] <= held[False]


@pytest.mark.parametrize(("b", "launches", "steps"), EVERY_KIND)
def test_pc1_duplicates_and_a_reset(b: int, launches: int, steps: int) -> None:
    """PC1, PC7: two hold the same block twice, the cache is forgotten, a third names it
    anew; whoever ends first, no name is given to two blocks."""
    for ends_first, longest in ((0, 1), (1, 0), (2, 0), (0, 2)):
        served = Served(config(b, launches, steps, num_blocks=100, max_num_seqs=4))
        prompt = [i % 97 for i in range(1, 2 * b + 1)]
        lengths = [12] * 3
        lengths[ends_first], lengths[longest] = 6, 30
        for i, length in enumerate(lengths):
            if i == 2:
                served.engine.reset_prefix_cache()
            served.add(f"{i}", prompt, length)
            served.step()
        served.finish()
        for i, length in enumerate(lengths):
            assert served.tokens(f"{i}") == direct(prompt, length)
        for i in range(100 // (40 // b) + 2):  # and everything is evicted once
            served.run(f"fill {i}", [50 + i] * 40, 1)
        served.engine.reset_prefix_cache()
        assert served.stats()["free_blocks"] == 100


def test_pc3_hits_are_looked_up_when_the_request_runs() -> None:
    """PC3 (vllm#18957): a hit length remembered from a failed admission."""
    served = Served(config(4, 1, 1, num_blocks=4, max_num_seqs=1))
    served.run("X", range(1, 9), 1)
    assert served.stats()["idle_cached_blocks"] == 2
    served.add("H", range(50, 63), 4)
    served.add("R", range(1, 10), 1)
    served.finish()
    (admitted,) = served.of("admitted", "R")
    assert admitted.data["cached_tokens"] == 0
    assert admitted.data["context_tokens"] == 9
    assert served.tokens("R") == [0]
    assert served.tokens("H") == direct(range(50, 63), 4)


@pytest.mark.parametrize(("b", "launches", "steps"), EVERY_KIND)
def test_pc3_of_every_kind(b: int, launches: int, steps: int) -> None:
    """PC3: with a slot to spare too, where only memory makes R wait."""
    for slots in (1, 2):
        served = Served(config(b, launches, steps, num_blocks=4, max_num_seqs=slots))
        x = [i % 97 for i in range(1, 2 * b + 1)]
        served.run("X", x, 1)
        h = [(50 + i) % 97 for i in range(3 * b + 1)]
        served.add("H", h, b)
        served.add("R", [*x, 96], 1)
        served.finish()
        assert served.outputs["R"].num_cached_tokens == 0
        assert served.tokens("R") == direct([*x, 96], 1)
        assert served.tokens("H") == direct(h, b)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_pc5_salts_share_nothing(executor: str) -> None:
    """PC5 (vllm#17045): the salted stranger sees exactly the cold time."""
    served = Served(JAX, executor=EXECUTORS[executor])
    cached, ttft_ms = [], []
    for i, salt in enumerate(["a", "a", "b", None, None]):
        output = served.run(f"{i}", range(1, 10), 1, cache_salt=salt)
        cached.append(output.num_cached_tokens)
        assert output.metrics.ttft_s is not None
        ttft_ms.append(1000 * output.metrics.ttft_s)
    assert cached == [0, 8, 0, 0, 8]
    assert ttft_ms == pytest.approx([19, 11, 19, 19, 11])
    with pytest.raises(ValueError, match="cache_salt='' must be a non-empty string"):
        served.add("empty", [1], 1, cache_salt="")


@pytest.mark.parametrize("b", BLOCK_SIZES)
def test_pc5_of_every_kind(b: int) -> None:
    """PC5: salts that look like tokens, like one another's heads, or like no salt."""
    served = Served(config(b, 2, 4, num_blocks=64))
    prompt = [(i * i) % 97 for i in range(2 * b + 1)]
    salts = [None, "a", "aa", "b", "None", "\x00", "a\x00", "weights", "0"]
    for repeat in range(2):
        for salt in salts:
            output = served.run(f"{salt} {repeat}", prompt, 1, cache_salt=salt)
            assert output.num_cached_tokens == 2 * b * repeat
            assert output.outputs[0].token_ids == direct(prompt, 1)


# The pool is what the host thinks it is -----------------------------------------------


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
