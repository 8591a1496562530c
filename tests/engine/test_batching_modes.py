"""Static batches and the three prefill modes, by hand: who shares a step, and when.

A step takes 10 ms and 1 ms for each prompt token and each decode row listed. The first
to be admitted has slot 0, the second slot 1.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxserve import Engine, EngineConfig, SamplingParams
from jaxserve.core import Event
from jaxserve.models.hash_model import HashModel
from jaxserve.scheduling.policies import fcfs
from tests import serving
from tests.engine import test_definition as definition
from tests.engine.harness import (
    JAX,
    JAX_4_STEPS,
    SCHEDULES,
    SIM_C,
    Served,
    by_priority,
    config,
    jax_executor,
    order,
    serve,
    sim_executor,
    truths,
)
from tests.engine.reference_executor import ReferenceExecutor
from tests.serving import Run, direct

A, B, C = [1, 2, 3], [4, 5, 6, 7, 8], [9, 10]


def static(launches: int = 1, steps: int = 1, **fields) -> EngineConfig:
    """Static batches of up to 2, blocks of 4 tokens, memory enough."""
    fields = {"num_blocks": 64, "batching": "static"} | fields
    return config(4, launches, steps, **fields)


def shares(run: Served | Run) -> list[list[tuple[int, int, int]]]:
    """(slot, prompt tokens, steps allowed) of each row of each launch with a step."""
    found = []
    for plan in run.recorder.plans:
        listed = plan.decode[plan.decode[:, 0] < run.engine.shape.max_slots]
        chunk = plan.chunk[:, 0].tolist()
        if plan.tokens:
            found.append([(s, chunk.count(s), steps) for s, steps in listed.tolist()])
    return found


def launched(served: Served, field: str) -> list:
    """A field of each launch that ran a step."""
    return [e.data[field] for e in served.of("launch") if e.data["steps"]]


def ends_s(served: Served, *names: str) -> list[float]:
    """When requests ended."""
    return [served.of("finished", name)[0].time_s for name in names]


def waits_s(served: Served, *names: str) -> list[float | None]:
    """How long requests that were complete waited for the end."""
    return [served.outputs[name].metrics.finish_delay_s for name in names]


def batches(served: Served | Run) -> list[list[str]]:
    """Who was admitted by one plan, plan by plan."""
    names = iter([e.request_id for e in served.events if e.kind == "admitted"])
    slots = served.engine.shape.max_slots
    joins = [int((p.admit[:, 0] < slots).sum()) for p in served.recorder.plans]
    return [[next(names) for _ in range(n)] for n in joins if n]  # type: ignore[misc]


# Static batches -----------------------------------------------------------------------


def test_a_static_batch_ends_with_its_longest() -> None:
    served = Served(static())
    for name, prompt, tokens in (("a", A, 2), ("b", B, 4), ("c", C, 1)):
        served.add(name, prompt, tokens)
    for _ in range(3):
        assert served.step() == []  # a is complete by now, and nobody is told
    served.finish()
    both = [(0, 0, 1), (1, 0, 1)]
    padded = [(0, 0, 0), (1, 0, 1)]
    assert shares(served)[:4] == [[(0, 3, 1), (1, 5, 1)], both, padded, padded]
    assert [n for _, n, _ in shares(served)[4]] == [2]
    # 18 ms for 8 prompt tokens, then 12 for two listed rows, whoever needs them.
    assert [e.time_s for e in served.of("launch")][:5] == pytest.approx(
        [0.018, 0.030, 0.042, 0.054, 0.066]
    )
    assert launched(served, "decode_rows") == [0, 2, 1, 1, 0]
    assert launched(served, "decode_tokens") == [2, 2, 1, 1, 1]
    # Mixed steps have room for 2 tokens or for 64.
    assert launched(served, "padded_tokens") == [56, 0, 1, 1, 0]
    a, b, c = (served.outputs[name].metrics for name in "abc")
    assert a.token_times_s == pytest.approx([0.054] * 2)
    assert b.token_times_s == pytest.approx([0.054] * 4)
    assert (a.finish_delay_s, b.finish_delay_s) == pytest.approx((0.024, 0.0))
    assert c.queue_s == pytest.approx(0.054) and c.finished_s == pytest.approx(0.066)
    for name, prompt, tokens in (("a", A, 2), ("b", B, 4), ("c", C, 1)):
        assert served.tokens(name) == direct(prompt, tokens)


def test_nobody_joins_a_static_batch() -> None:
    """Not even where a slot was free from the start."""
    served = Served(static(max_num_seqs=3))
    served.add("a", A, 1)
    served.add("b", B, 4)
    served.add("late", C, 1, arrival_time=0.001)
    served.finish()
    assert batches(served) == [["a", "b"], ["late"]]
    late = served.outputs["late"].metrics
    # Seen by the second plan, at 18 ms; the batch goes on for 3 steps of 12.
    assert late.admission_delay_s == pytest.approx(0.017)
    assert late.queue_s == pytest.approx(0.053)
    assert ends_s(served, "a", "b", "late") == pytest.approx([0.054, 0.054, 0.066])


@pytest.mark.parametrize("steps", [1, 4])
def test_all_prompts_of_a_static_batch_come_before_any_decode(steps: int) -> None:
    served = Served(static(steps=steps, max_num_batched_tokens=8))
    served.add("a", [1] * 10, 6)
    served.add("b", [2] * 7, 6)
    served.finish()
    # Whoever has its first token waits for the others' prompts, N or no N.
    prompts = [[(0, 8, 0)], [(0, 2, 1), (1, 6, 0)], [(1, 1, 1)]]
    decodes = {1: [1] * 5, 4: [4, 1]}[steps]
    assert shares(served) == prompts + [[(0, 0, n), (1, 0, n)] for n in decodes]
    assert ends_s(served, "a", "b") == pytest.approx([0.018 * 2 + 0.011 + 0.060] * 2)
    assert served.tokens("a") == direct([1] * 10, 6)
    assert served.tokens("b") == direct([2] * 7, 6)


def test_chunks_of_a_static_batch_are_capped() -> None:
    served = Served(static(max_chunk_tokens=3))
    served.add("a", B, 2)
    served.add("b", C, 2)
    served.finish()
    assert shares(served) == [
        [(0, 3, 0), (1, 2, 1)],
        [(0, 2, 1)],
        [(0, 0, 1), (1, 0, 1)],
    ]


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        # To their ends they write 8, 12, 5 and 1 KV rows: 2, 3, 2 and 1 blocks. Nobody
        # passes one that does not fit, though all prompts together need only 5.
        (3, [["a"], ["b"], ["c", "d"]]),
        (4, [["a"], ["b"], ["c", "d"]]),
        (5, [["a", "b"], ["c", "d"]]),
        (6, [["a", "b"], ["c", "d"]]),
        (7, [["a", "b", "c"], ["d"]]),
        (8, [["a", "b", "c", "d"]]),
    ],
)
@pytest.mark.parametrize(("launches", "steps"), SCHEDULES)
@pytest.mark.parametrize("caching", [False, True])
def test_a_static_batch_takes_what_fits_to_its_end(
    blocks: int, expected: list, launches: int, steps: int, caching: bool
) -> None:
    made = static(
        launches,
        steps,
        num_blocks=blocks,
        max_num_seqs=4,
        enable_prefix_caching=caching,
    )
    served = Served(made)
    jobs = {"a": (4, 5), "b": (5, 8), "c": (1, 5), "d": (1, 1)}
    for name, (prompt, tokens) in jobs.items():
        served.add(name, [ord(name) - 96] * prompt, tokens)
    served.finish()
    assert batches(served) == expected
    assert served.stats()["preemptions"] == 0
    for name, (prompt, tokens) in jobs.items():
        assert served.tokens(name) == direct([ord(name) - 96] * prompt, tokens)
        assert served.reason(name) == "length"


@pytest.mark.parametrize("max_tokens", [None, 1000])
def test_the_worst_case_is_capped_by_the_blocks_that_exist(max_tokens) -> None:
    served = Served(static(num_blocks=6))
    served.add("all", [1] * 4, max_tokens)
    served.add("one", [2], 1)
    served.finish()
    # 6 blocks hold 24 rows: 4 of the prompt, and all but the last of 21 tokens.
    assert batches(served) == [["all"], ["one"]]
    assert served.tokens("all") == direct([1] * 4, 21)
    assert served.reason("all") == "length"


def test_a_static_batch_is_taken_in_the_policys_order() -> None:
    served = Served(static(), policy=by_priority())
    for name, priority in (("low", 2), ("mid", 1), ("late", 1), ("high", 0)):
        served.add(name, A, 2, priority=priority)
    served.finish()
    assert batches(served) == [["high", "mid"], ["late", "low"]]


def test_a_higher_priority_displaces_nobody_from_a_static_batch() -> None:
    served = Served(static(num_blocks=4), policy=by_priority())
    served.add("a", A, 6, priority=1)
    served.add("b", B, 4, priority=1)
    served.step()
    served.add("urgent", C, 1, priority=-1)
    served.finish()
    assert batches(served) == [["a", "b"], ["urgent"]]
    assert not served.of("preempted")


@pytest.mark.parametrize("steps", [1, 4])
def test_a_stop_id_inside_a_static_batch(steps: int) -> None:
    stop = direct(A, 3)[-1]
    assert direct(A, 9, (stop,)) == direct(A, 3) and stop not in direct(B, 5)
    served = Served(static(steps=steps), eos=(stop,))
    served.add("a", A, 9)
    served.add("b", B, 5)
    served.finish()
    assert served.tokens("a") == direct(A, 3) and served.reason("a") == "stop"
    assert served.tokens("b") == direct(B, 5) and served.reason("b") == "length"
    # The prompts' step of 18 ms, then 4 of 12: a is complete after 2 of these.
    assert ends_s(served, "a", "b") == pytest.approx([0.066] * 2)
    assert waits_s(served, "a", "b") == pytest.approx([0.024, 0.0])
    if steps == 1:
        assert shares(served)[3:] == [[(0, 0, 0), (1, 0, 1)]] * 2


def test_the_next_static_batch_starts_before_the_last_outputs_are_read() -> None:
    """With two in flight an end by max_tokens is certain as soon as it is planned."""
    served = Served(static(launches=2))
    for name, prompt, tokens in (("a", A, 2), ("b", B, 2), ("c", C, 1)):
        served.add(name, prompt, tokens)
    served.finish()
    # Both launches of the batch are planned at 0. The first is read at 18 ms, when c is
    # admitted; the second ends at 30, and c's with its 2 tokens at 42.
    assert served.of("admitted", "c")[0].time_s == pytest.approx(0.018)
    assert ends_s(served, "a", "b", "c") == pytest.approx([0.030, 0.030, 0.042])
    assert waits_s(served, "a", "b", "c") == pytest.approx([0.0] * 3)


def test_prefix_hits_across_static_batches() -> None:
    """Prompts of one batch are computed side by side; those of the next find them."""
    served = Served(static())
    prompt = list(range(9))
    for i in range(4):
        served.add(f"{i}", prompt, 3)
    served.finish()
    assert [e.data["cached_tokens"] for e in served.of("admitted")] == [0, 0, 8, 8]
    assert [n for n in launched(served, "prefill_tokens") if n] == [18, 2]
    assert all(served.tokens(f"{i}") == direct(prompt, 3) for i in range(4))
    assert served.stats()["prefix_hits_tokens"] == 16


def test_cached_blocks_count_once_in_a_static_batch() -> None:
    served = Served(static(num_blocks=4, max_num_seqs=3))
    prompt = list(range(9))
    for i in range(4):
        served.add(f"{i}", prompt, 4)
    served.finish()
    # 12 rows each: 3 blocks. Of the first's, 2 are shared then, and 2 are left for the
    # third of one each.
    assert batches(served) == [["0"], ["1", "2"], ["3"]]
    assert all(served.tokens(f"{i}") == direct(prompt, 4) for i in range(4))


def test_an_abort_inside_a_static_batch() -> None:
    """Its row is padding from then on; the rest goes on as before."""
    served = Served(static())
    for name, prompt, tokens in (("a", A, 9), ("b", B, 4), ("c", C, 1)):
        served.add(name, prompt, tokens)
    served.step()
    served.step()
    assert served.engine.abort_request("a")
    (output,) = served.step()
    assert output.request_id == "a" and served.reason("a") == "abort"
    assert served.tokens("a") == direct(A, 2)
    served.finish()
    assert shares(served)[2:4] == [[(0, 0, 0), (1, 0, 1)]] * 2
    assert ends_s(served, "a", "b", "c") == pytest.approx([0.030, 0.054, 0.066])
    assert waits_s(served, "a", "b") == pytest.approx([0.0, 0.0])
    assert batches(served) == [["a", "b"], ["c"]]


def test_an_abort_inside_the_prompts_of_a_static_batch() -> None:
    served = Served(static(max_num_batched_tokens=4))
    served.add("a", [1] * 12, 3)
    served.add("b", B, 2)
    served.step()
    served.engine.abort_request("a")
    served.finish()
    assert shares(served) == [
        [(0, 4, 0)],
        [(1, 4, 0)],
        [(1, 1, 1)],
        [(0, 0, 0), (1, 0, 1)],
    ]
    assert served.tokens("b") == direct(B, 2)


def test_a_whole_static_batch_is_aborted() -> None:
    served = Served(static())
    for name in ("a", "b", "c"):
        served.add(name, A, 9)
    served.step()
    served.step()
    for name in ("a", "b"):
        served.engine.abort_request(name)
    served.finish()
    assert batches(served) == [["a", "b"], ["c"]]
    assert served.of("admitted", "c")[0].time_s == pytest.approx(0.016 + 0.012)
    assert served.tokens("c") == direct(A, 9)


def test_an_abort_of_the_last_to_run_releases_the_answers() -> None:
    served = Served(static())
    for name, prompt, tokens in (("a", A, 2), ("b", B, 9), ("c", C, 1)):
        served.add(name, prompt, tokens)
    for _ in range(3):
        served.step()
    served.engine.abort_request("b")
    served.finish()
    assert ends_s(served, "a", "b") == pytest.approx([0.042, 0.042])
    assert waits_s(served, "a") == pytest.approx([0.012])


def test_the_events_of_an_aborted_request_add_up() -> None:
    served = Served(static())
    served.add("a", A, 9)
    served.add("b", B, 4)
    served.step()
    served.step()
    served.engine.abort_request("a")
    served.finish()
    told = sum(e.data["output_tokens"] for e in served.of("progressed", "a"))
    assert told == served.of("finished", "a")[0].data["output_tokens"] == 2
    assert served.outputs["a"].metrics.output_tokens == 2


def test_an_abort_after_its_slot_was_given_back_tells_what_it_had() -> None:
    """With three launches in flight the batch is over before its ends are read."""
    served = Served(static(launches=3))
    for name, prompt in (("a", A), ("b", B), ("c", C)):
        served.add(name, prompt, 4)
    served.until(lambda: len(served.of("admitted")) == 3)
    assert served.engine.abort_request("a")
    served.finish()
    output = served.outputs["a"]
    assert served.reason("a") == "abort"
    assert served.tokens("a") == direct(A, 4)[: len(served.tokens("a"))] != []
    assert output.metrics.output_tokens == len(served.tokens("a"))
    told = sum(e.data["output_tokens"] for e in served.of("progressed", "a"))
    assert told == served.of("finished", "a")[0].data["output_tokens"]


@pytest.mark.parametrize("made", [JAX, JAX_4_STEPS], ids=["1 step", "4 steps"])
@pytest.mark.parametrize("caching", [False, True])
def test_static_batches_on_the_device(made: EngineConfig, caching: bool) -> None:
    made = dataclasses.replace(
        made, batching="static", enable_prefix_caching=caching, num_blocks=64
    )
    jobs = serving.workload(5, 24, longest_prompt=24, longest_output=16)
    runs = [
        serve(Served(made, eos=serving.EOS, executor=executor), jobs)
        for executor in (jax_executor(), sim_executor(truths(jobs, serving.EOS)))
    ]
    for i, job in enumerate(jobs):
        for run in runs:
            tokens = run.outputs[str(i)].outputs[0].token_ids
            assert tokens == job.expected(serving.EOS)
    assert serving.same_plans(runs[0].recorder.plans, runs[1].recorder.plans)
    check_batches(runs[0], set())


# Who shares a step --------------------------------------------------------------------

DECODE_A = [(0, 0, 1)]
WITH_A = [
    [(0, 0, 1), (1, 7, 0)],
    [(0, 0, 1), (1, 7, 0)],
    [(0, 0, 1), (1, 6, 1)],
]
ALONE = [[(1, 8, 0)], [(1, 8, 0)], [(1, 4, 1)]]


@pytest.mark.parametrize(
    ("prefill", "policy", "prompt_of_b", "gaps_ms"),
    [
        # Steps of 8 tokens take 18 ms, of 7 tokens 17, of 2 decodes 12, of one 11.
        ("chunked", fcfs, WITH_A, [18, 18, 17, 12, 11]),
        ("decode_first", fcfs, WITH_A, [18, 18, 17, 12, 11]),
        ("prefill_first", fcfs, ALONE, [18 + 18 + 14 + 12, 11, 11, 11, 11]),
        # b, of higher rank, takes the whole budget twice and leaves room then.
        (
            "chunked",
            by_priority,
            [*ALONE[:2], [(0, 0, 1), (1, 4, 1)]],
            [18 + 18 + 15, 12, 11, 11, 11],
        ),
        ("decode_first", by_priority, WITH_A, [18, 18, 17, 12, 11]),
        ("prefill_first", by_priority, ALONE, [18 + 18 + 14 + 12, 11, 11, 11, 11]),
    ],
)
def test_who_shares_a_step_with_a_prompt(prefill, policy, prompt_of_b, gaps_ms) -> None:
    """a decodes; b comes with a prompt of 20 and a budget of 8 tokens a step."""
    made = config(4, 1, 1, num_blocks=64, max_num_batched_tokens=8, prefill=prefill)
    served = Served(made, policy=policy())
    served.add("a", [1, 2], 6, priority=1)
    served.add("b", [3] * 20, 2, arrival_time=0.001, priority=0)
    served.finish()
    found = shares(served)
    assert found[:4] == [[(0, 2, 1)], *prompt_of_b]
    assert sorted(found[4]) == [(0, 0, 1), (1, 0, 1)]  # b's second token is its last
    assert all(row == DECODE_A for row in found[5:])
    gaps_s = served.outputs["a"].metrics.itl_s
    assert [1000 * gap for gap in gaps_s] == pytest.approx(gaps_ms)
    assert served.tokens("a") == direct([1, 2], 6)
    assert served.tokens("b") == direct([3] * 20, 2)


@pytest.mark.parametrize("prefill", ["chunked", "prefill_first", "decode_first"])
def test_prompts_share_the_budget_in_every_mode(prefill: str) -> None:
    made = config(
        4,
        1,
        1,
        num_blocks=64,
        max_num_seqs=3,
        max_num_batched_tokens=8,
        max_chunk_tokens=4,
        prefill=prefill,
    )
    served = Served(made)
    served.add("a", [1], 4)
    served.add("b", [2] * 9, 1, arrival_time=0.001)
    served.add("c", [3] * 5, 1, arrival_time=0.001)
    served.finish()
    expected = {
        "prefill_first": [[(1, 4, 0), (2, 4, 0)], [(1, 4, 0), (2, 1, 1)], [(1, 1, 1)]],
        "chunked": [
            [(0, 0, 1), (1, 4, 0), (2, 3, 0)],
            [(0, 0, 1), (1, 4, 0), (2, 2, 1)],
            [(0, 0, 1), (1, 1, 1)],
        ],
    }
    expected["decode_first"] = expected["chunked"]
    assert shares(served)[1:4] == expected[prefill]


def test_steps_of_a_launch_by_prefill_mode() -> None:
    """A launch of prompts alone samples their first tokens and no more."""
    expected = {
        "chunked": [[(0, 2, 4)], [(0, 0, 4)], [(0, 0, 1)]],
        "decode_first": [[(0, 2, 4)], [(0, 0, 4)], [(0, 0, 1)]],
        "prefill_first": [[(0, 2, 1)], [(0, 0, 4)], [(0, 0, 4)]],
    }
    for prefill, rows in expected.items():
        served = Served(config(4, 1, 4, num_blocks=64, prefill=prefill))
        served.run("a", [1, 2], 9)
        assert shares(served) == rows


@pytest.mark.parametrize("limit", [{"max_num_seqs": 1}, {"num_blocks": 4}])
def test_decodes_go_on_while_a_prompt_cannot_be_computed(limit: dict) -> None:
    """prefill_first: one that waits for a slot or for memory stalls nobody."""
    served = Served(
        config(4, 1, 1, **{"num_blocks": 64, **limit}, prefill="prefill_first")
    )
    served.add("a", [1] * 8, 5)
    served.add("b", [2] * 12, 1, arrival_time=0.001)
    served.finish()
    assert [len(rows) for rows in shares(served)] == [1] * 6
    assert ends_s(served, "a") == pytest.approx([0.018 + 4 * 0.011])


@pytest.mark.parametrize("prefill", ["chunked", "prefill_first", "decode_first"])
@pytest.mark.parametrize(
    ("blocks", "slots", "prompt"), [(64, 1, 6), (6, 3, 20)], ids=["slot", "blocks"]
)
def test_who_decodes_is_displaced_in_every_mode(prefill, blocks, slots, prompt) -> None:
    """A victim of this plan has no row in it (the SC3 of the cases)."""
    made = config(4, 1, 1, num_blocks=blocks, max_num_seqs=slots, prefill=prefill)
    served = Served(made, policy=by_priority())
    served.add("low", [1] * 3, 12, priority=1)
    served.step()
    served.step()
    served.add("high", [2] * prompt, 3, priority=0)
    served.finish()
    assert order(served, "preempted") == ["low"]
    assert order(served, "finished") == ["high", "low"]
    assert served.tokens("low") == direct([1] * 3, 12)
    assert served.tokens("high") == direct([2] * prompt, 3)


# Delays of scheduling every N steps ---------------------------------------------------


def test_delays_of_four_steps_a_launch() -> None:
    served = Served(config(4, 1, 4, num_blocks=64))
    served.add("a", [1], 2)
    served.add("b", [2], 8)
    served.add("c", [3], 3, arrival_time=0.050)
    served.finish()
    # Four steps of 12 ms: a is complete after two, b in the second launch, of four
    # steps of 11 without a. c, seen after it, has a launch of its own three steps.
    assert waits_s(served, "a", "b", "c") == pytest.approx([0.024, 0.0, 0.0])
    assert ends_s(served, "a", "b", "c") == pytest.approx([0.048, 0.092, 0.125])
    delays = [served.outputs[name].metrics.admission_delay_s for name in "abc"]
    assert delays == pytest.approx([0.0, 0.0, 0.042])


def test_a_request_is_seen_before_there_is_room() -> None:
    served = Served(config(4, 1, 2, num_blocks=64, max_num_seqs=1))
    served.add("a", [1], 6)
    served.add("b", [2], 1, arrival_time=0.005)
    served.finish()
    # Three launches of two steps of 11 ms.
    b = served.outputs["b"].metrics
    assert b.admission_delay_s == pytest.approx(0.017)
    assert b.queue_s == pytest.approx(0.061)


class Letters:
    """A tokenizer of one character a token."""

    def decode(self, ids) -> str:
        return "".join(chr(0x4E00 + token) for token in ids)


def with_text(made: EngineConfig) -> tuple[Engine, list[Event]]:
    """An engine that knows text, so that stop strings end requests."""
    events: list[Event] = []
    model = HashModel()
    engine = Engine(
        model,
        model.init_params(),
        made,
        tokenizer=Letters(),
        executor=lambda model, params, shape: ReferenceExecutor(shape, SIM_C),
        on_event=events.append,
    )
    return engine, events


def serve_text(engine: Engine, stop_at: int) -> dict:
    """Serve a, which its text ends at a token, and b of 8 tokens; last outputs."""
    stop = Letters().decode(direct(A, 8)[stop_at - 1 : stop_at])
    for name, prompt, stops in (("a", A, stop), ("b", B, None)):
        params = SamplingParams(temperature=0.0, max_tokens=8, stop=stops)
        engine.add_request(name, prompt, params)
    found = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: output for output in engine.step()}
    assert engine.holds_nothing()
    return found


@pytest.mark.parametrize(("launches", "steps"), SCHEDULES)
def test_a_stop_string_inside_a_static_batch(launches: int, steps: int) -> None:
    assert len(set(direct(A, 8))) == 8
    engine, _ = with_text(static(launches, steps))
    found = serve_text(engine, 3)
    assert found["a"].outputs[0].token_ids == direct(A, 3)
    assert found["a"].outputs[0].finish_reason == "stop"
    assert found["b"].outputs[0].token_ids == direct(B, 8)
    # The prompts' step, and 7 steps of two listed rows.
    times = [found[name].metrics.finished_s for name in "ab"]
    assert times == pytest.approx([0.018 + 7 * 0.012] * 2)
    # The first launch samples one token, each later one up to N. Those sampled in the
    # launch of the third and in the launches planned before it was read are dropped.
    last = 1 + steps * (-(-2 // steps) + launches - 1)
    assert engine.stats()["dropped_tokens"] == min(last, 8) - 3


def test_a_stop_string_waits_for_the_rest_of_its_launch() -> None:
    engine, _ = with_text(config(4, 1, 4, num_blocks=64))
    found = serve_text(engine, 2)
    assert found["a"].outputs[0].token_ids == direct(A, 2)
    # 18 + 3 * 12 = 54 ms for four steps, of which two come after a's last token.
    assert found["a"].metrics.finish_delay_s == pytest.approx(0.027)


# Random runs --------------------------------------------------------------------------


def check_batches(run: Run, aborted: set[str]) -> None:
    """Static batching from the plans and events alone."""
    slots = run.engine.shape.max_slots
    admitted = iter([e for e in run.events if e.kind == "admitted"])
    left: dict[int, tuple[str, int]] = {}  # slot: who, prompt tokens to compute
    for plan in run.recorder.plans:
        for slot in plan.release[plan.release < slots].tolist():
            del left[slot]
        joins = int((plan.admit[:, 0] < slots).sum())
        assert not (joins and left), "somebody joins"
        for _ in range(joins):
            event = next(admitted)
            todo = event.data["context_tokens"] - event.data["cached_tokens"]
            left[event.data["slot"]] = event.request_id or "", todo
        listed = plan.decode[plan.decode[:, 0] < slots, 0].tolist()
        prompts = np.unique(plan.chunk[plan.chunk[:, 0] < slots, 0]).tolist()
        if prompts:
            assert sorted(prompts) == sorted(listed), "a decode beside a prompt"
            for slot in prompts:
                name, todo = left[slot]
                left[slot] = name, todo - int((plan.chunk[:, 0] == slot).sum())
        elif listed:
            assert sorted(listed) == sorted(left), "not all of the batch are listed"
            assert all(not todo or name in aborted for name, todo in left.values())
    assert not left and next(admitted, None) is None
    ends = {e.request_id: e.time_s for e in run.events if e.kind == "finished"}
    last_s = 0.0
    for batch in batches(run):
        times = {ends[name] for name in batch if name not in aborted}
        assert len(times) <= 1, "not answered together"
        assert min(times, default=last_s) >= last_s
        last_s = max(times, default=last_s)
    assert not [e for e in run.events if e.kind == "preempted"]


def check_modes(run: Run, prefill: str) -> None:
    """Who shares a step, from the plans alone."""
    for rows in shares(run):
        prompts = [n for _, n, _ in rows if n]
        if prefill == "prefill_first":
            assert not prompts or len(prompts) == len(rows)
            assert not prompts or max(steps for _, _, steps in rows) <= 1


def check(seed: int, **mode: str) -> None:
    setting = definition.Setting.of(seed)
    setting = dataclasses.replace(
        setting, config=dataclasses.replace(setting.config, **mode)
    )
    run = setting.run(seed=seed)
    definition.check_outputs(setting, run)
    definition.check_launches(setting, run)
    aborted = {
        name
        for name, output in run.outputs.items()
        if output.outputs[0].finish_reason == "abort"
    }
    if mode.get("batching") == "static":
        check_batches(run, aborted)
    else:
        check_modes(run, mode["prefill"])
    if not aborted:
        definition.check_events(setting, run)
    definition.check_empty(run)
    simulated = setting.run(executor=sim_executor(truths(setting.jobs, setting.eos)))
    simulated.engine.settle_tiers()
    simulated.engine.reset_prefix_cache()
    assert serving.same_plans(run.recorder.plans, simulated.recorder.plans)


MODES = [
    {"batching": "static"},
    {"prefill": "prefill_first"},
    {"prefill": "decode_first"},
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block", range(4))
def test_any_engine_in_any_mode(block: int, mode: dict) -> None:
    for seed in range(10 * block, 10 * block + 10):
        check(seed, **mode)


@pytest.mark.fuzz
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block", range(20))
def test_many_engines_in_any_mode(block: int, mode: dict) -> None:
    for seed in range(20_000 + 50 * block, 20_050 + 50 * block):
        check(seed, **mode)
