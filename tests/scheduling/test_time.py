"""What a plan may know, and when: on the definition."""

from __future__ import annotations

import random

import numpy as np
import pytest

from jaxserve.executors.sim_executor import SimExecutor, Truth
from jaxserve.scheduling.policies import fcfs
from tests import serving
from tests.engine.harness import (
    SCHEDULES,
    SIM_C,
    Served,
    by_priority,
    config,
    order,
    serve,
    sim_executor,
    truths,
)
from tests.serving import Job, direct, greedy


@pytest.mark.parametrize("launches", [1, 2, 3])
def test_the_host_has_read_exactly_so_far(launches: int) -> None:
    """Before planning k it has observed through k - d, ready or not."""
    served = Served(config(4, launches, 1, num_blocks=40))
    served.add("r", [1] * 6, 30)
    read = []
    while len(served.tokens("r")) < 20:
        served.step()
        read.append((len(served.recorder.plans), len(served.recorder.outputs)))
    assert read == [(k, max(0, k - launches + 1)) for k in range(1, len(read) + 1)]


@pytest.mark.parametrize("policy", [fcfs, by_priority])
@pytest.mark.parametrize(("launches", "steps"), SCHEDULES)
def test_plans_do_not_see_the_future(launches: int, steps: int, policy) -> None:
    """Two truths that agree up to a token give identical plans up to its launch."""
    differed = 0
    for seed in range(6):
        rng = random.Random(seed)
        jobs = [
            Job(j.prompt, 20, j.arrival_s, j.salt, priority=j.priority)
            for j in serving.workload(seed, 12, spread_s=0.2)
        ]
        truth = truths(jobs)
        who, at = rng.randrange(12), rng.randint(1, 18)
        full = truth[who].tokens
        other = dict(truth)
        if seed % 2:  # it stops there
            other[who] = Truth(full[:at], stops=True)
        else:  # it goes on with other tokens
            changed = [(t + 1) % 97 for t in full[at:]]
            other[who] = Truth([*full[:at], *changed], stops=False)
        runs = []
        for known in (truth, other):
            fields = {"num_blocks": 14, "max_num_seqs": 4}
            served = Served(
                config(4, launches, steps, **fields),
                policy=policy(),
                executor=sim_executor(known),
            )
            runs.append(serve(served, jobs).recorder)
        one, two = runs
        assert isinstance(one.inner, SimExecutor)
        first = next(
            k
            for k, pair in enumerate(zip(one.outputs, two.outputs, strict=False))
            if any(
                not np.array_equal(getattr(pair[0], field), getattr(pair[1], field))
                for field in ("tokens", "ran", "done")
            )
        )
        known = first + launches  # plans made before that output was read
        assert serving.same_plans(one.plans[:known], two.plans[:known])
        differed += not serving.same_plans(one.plans, two.plans)
    assert differed >= 2  # the outputs do matter to later plans


@pytest.mark.parametrize("launches", [1, 2])
def test_a_request_is_seen_by_the_first_plan_after_its_arrival(launches: int) -> None:
    """Also by the plan that gives back what the last request held (contract 2)."""
    served = Served(config(4, launches, 1, num_blocks=40), eos=(60,))
    served.add("a", range(1, 10), 9)  # 0, 66, 60: it stops at 41 ms
    served.add("b", [1, 2], 1, arrival_time=0.0405)
    served.finish()
    after = [e.data for e in served.of("launch") if e.data["submitted_s"] >= 0.0405]
    assert served.of("arrived", "b")[0].time_s == after[0]["submitted_s"]
    assert after[0]["prefill_tokens"] == 2


def test_an_idle_engine_sleeps_until_the_next_arrival() -> None:
    served = Served(config(4, 1, 1, num_blocks=40))
    served.add("b", [1, 2], 1, arrival_time=7.25)
    served.add("a", [1], 1, arrival_time=3.0)
    served.finish()
    assert served.outputs["a"].metrics.admitted_s == 3.0
    assert served.outputs["a"].metrics.ttft_s == pytest.approx(0.011)
    assert served.outputs["b"].metrics.admitted_s == 7.25
    assert served.outputs["b"].metrics.ttft_s == pytest.approx(0.012)


def test_a_quantum_bounds_the_steps_and_never_idles() -> None:
    for quantum, expected in ((3, [3, 3, 3, 1]), (0, [1] * 10), (None, [8, 2])):
        policy = fcfs()._replace(allow=lambda state, view, q=quantum: q)
        served = Served(config(4, 1, 8, num_blocks=40), policy=policy)
        served.run("r", [1] * 5, 10)
        launches = [e.data for e in served.of("launch") if e.data["token_bucket"]]
        assert [x["decode_tokens"] for x in launches] == expected
        assert served.tokens("r") == direct([1] * 5, 10)


def test_who_waits_for_anothers_prefill_waits_a_bounded_time() -> None:
    """A request that waits to share must not wait for a producer that does not run.

    The producer, of a larger class, gets no token of the budget while a stream of
    newcomers takes it all. Without the wait, its equal would be first in line.
    """
    served = Served(
        config(4, 1, 1, num_blocks=64, max_num_seqs=4, max_num_batched_tokens=8),
        policy=by_priority(),
    )
    prompt = list(range(40))
    served.add("producer", prompt, 1, priority=1)
    served.step()
    served.add("waits", [*prompt, 1], 1, priority=0)
    for i in range(60):
        served.add(f"{i}", [50 + i % 40, *range(7)], 1, priority=0)
        served.step()
    passed = [name for name in order(served, "admitted") if name.isdigit()]
    assert served.of("admitted", "waits"), f"{len(passed)} newcomers have passed it"


def test_sim_c_is_the_cases_clock() -> None:
    """A step costs 10 ms and 1 ms for each token scheduled in it."""
    served = Served(config(4, 1, 1, num_blocks=40), executor=None, cost=SIM_C)
    served.add("a", [1] * 7, 3)
    served.add("b", [2] * 2, 2)
    served.finish()
    assert served.outputs["a"].metrics.token_times_s == pytest.approx(
        (0.019, 0.031, 0.042)
    )
    assert served.outputs["b"].metrics.token_times_s == pytest.approx((0.019, 0.031))


def test_a_policy_hears_whole_lives_of_requests_and_nothing_else() -> None:
    """First that it arrived, last that it finished: so a map by index can be exact."""
    heard: list = []

    def update(state, events, view_of):
        for e in events:
            if e.kind == "arrived":
                assert e.data["index"] not in state
                state = {**state, e.data["index"]: 0}
            assert e.data["index"] in state, f"{e.kind} of one that never arrived"
            if e.kind == "finished":
                state = {i: n for i, n in state.items() if i != e.data["index"]}
        heard.extend(events)
        return state, ()

    policy = by_priority()._replace(init=lambda: {}, update=update)
    served = Served(config(4, 2, 1, num_blocks=8, max_num_seqs=2), policy=policy)
    for i in range(6):
        served.add(f"{i}", [i + 1] * 5, 6, priority=i % 3, arrival_time=0.01 * i)
    served.add("later", [1], 3, arrival_time=0.3)
    served.add("never", [1], 3, arrival_time=0.3)
    served.step()
    assert served.engine.abort_request("never")
    served.finish()
    kinds = {e.kind for e in heard}
    slot = {"admitted", "progressed", "preempted", "resumed"}
    assert kinds == {"arrived", *slot, "finished"}
    told = [(e.kind, e.data["index"], e.time_s) for e in heard]
    mine = [
        (e.kind, e.data["index"], e.time_s)
        for e in served.events
        if e.kind != "launch" and e.request_id != "never"
    ]
    # In the order of the engine's events; the last ones wait for another plan.
    assert told == mine[: len(told)] and len(told) >= len(mine) - 3


@pytest.mark.parametrize("launches", [1, 2, 3])
def test_a_view_counts_what_is_in_flight_also_of_the_preempted(launches: int) -> None:
    """Tokens of launches not read yet were planned for certain: no count goes back."""
    seen: dict[int, list[tuple[int, bool]]] = {}

    def rank(state, view, now_s):
        seen.setdefault(view.index, []).append((view.output_tokens, view.running))
        return view.priority, (view.arrival_s,)

    policy = fcfs()._replace(
        rank=rank, update=lambda state, events, view_of: (state, None)
    )
    served = Served(
        config(4, launches, 1, num_blocks=40, max_num_seqs=1), policy=policy
    )
    served.add("r", [1] * 5, 12, priority=1)
    served.until(lambda: len(served.tokens("r")) >= 3)
    served.add("urgent", [9], 2, priority=0)
    served.finish()
    assert served.of("preempted", "r")
    counts = [count for count, _ in seen[0]]
    assert counts == sorted(counts), "a token was counted, and then not"
    assert counts[-1] >= 11


def test_a_view_has_the_text_and_what_the_cache_holds_now() -> None:
    seen: dict[int, set[tuple[str | None, int, bool]]] = {}

    def rank(state, view, now_s):
        note = (view.text, view.cached_tokens, view.running)
        seen.setdefault(view.index, set()).add(note)
        return 0, (view.arrival_s, view.index)

    policy = fcfs()._replace(rank=rank, until=lambda state, view, now_s: now_s)
    served = Served(config(4, 1, 1, num_blocks=40, max_num_seqs=1), policy=policy)
    served.engine.add_request("a", [1] * 9, greedy(4), prompt="briefly")
    served.add("b", [1] * 9, 1)  # waits while a's two full blocks get their names
    served.finish()
    assert seen[0] == {("briefly", 0, False), ("briefly", 0, True)}
    assert seen[1] == {(None, 0, False), (None, 8, False)}
