"""Who gets in, who gives way, who waits: what the scheduler promises."""

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
    equals,
    serve,
    sim_executor,
    truths,
)
from tests.serving import Job, direct


def order(served: Served, kind: str) -> list[str]:
    """Who the events of a kind are about, first to last."""
    return [e.request_id or "" for e in served.of(kind)]


def rows(served: Served) -> list[int]:
    """How many rows each launch with any had."""
    return [len(e.data["slots"]) for e in served.of("launch") if e.data["slots"]]


# Admission ----------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 1, 3])
@pytest.mark.parametrize(("launches", "steps"), SCHEDULES)
def test_a_head_that_does_not_fit_is_passed_at_most_so_often(
    launches: int, steps: int, limit: int
) -> None:
    served = Served(
        config(
            4,
            launches,
            steps,
            num_blocks=10,
            max_num_seqs=8,
            max_chunk_tokens=8,
            skip_limit=limit,
            enable_prefix_caching=False,
        )
    )
    served.add("runs", [1] * 20, 13)  # 8 blocks at its end
    served.step()
    served.add("head", [2] * 24, 2)  # 6 or 7 blocks: not before it has ended
    for i in range(6):
        served.add(f"small {i}", [3 + i], 2)
    served.finish()
    first = order(served, "admitted")
    assert first.index("head") == 1 + limit
    assert first[1 : 1 + limit] == [f"small {i}" for i in range(limit)]
    assert served.tokens("head") == direct([2] * 24, 2)


@pytest.mark.parametrize("seed", range(12))
def test_overtaking_is_bounded_in_any_workload(seed: int) -> None:
    """Slots to spare and no cache, so that memory is all there is to wait for."""
    rng = random.Random(seed)
    limit = rng.choice([0, 0, 1, 4])
    jobs = serving.workload(seed, 25, spread_s=rng.choice([0.0, 0.3]))
    served = Served(
        config(
            rng.choice([1, 2, 4]),
            rng.choice([1, 2, 3]),
            rng.choice([1, 4]),
            num_blocks=48,
            max_num_seqs=25,
            enable_prefix_caching=False,
            skip_limit=limit,
        )
    )
    serve(served, jobs)
    first = [e for e in served.of("admitted") if e.data["first"]]
    admitted = [int(e.request_id or 0) for e in first]
    ahead = {i: (job.arrival_s, i) for i, job in enumerate(jobs)}
    passed = []
    for place, i in enumerate(admitted):
        passed.append(sum(ahead[j] > ahead[i] for j in admitted[:place]))
    assert max(passed) <= limit
    if not limit:
        assert admitted == sorted(admitted, key=lambda i: ahead[i])


@pytest.mark.parametrize("limited_by", ["slots", "blocks"])
@pytest.mark.parametrize("launches", [1, 2, 3])
def test_a_smaller_class_displaces_the_farthest_and_no_more_than_it_needs(
    launches: int, limited_by: str
) -> None:
    slots, blocks = (3, 40) if limited_by == "slots" else (8, 10)
    served = Served(
        config(4, launches, 1, num_blocks=blocks, max_num_seqs=slots),
        policy=by_priority(),
    )
    prompts = {"a": [1] * 9, "b": [2] * 9, "c": [3] * 9}  # 3 blocks each
    for name, prompt in prompts.items():
        served.add(name, prompt, 4, priority=1 if name == "a" else 2)
    served.step()
    assert order(served, "admitted") == ["a", "b", "c"]
    served.add("urgent", [7] * 6, 4, priority=0)  # 2 or 3 blocks, and one is free
    served.step()
    assert order(served, "preempted") == ["c"]
    assert order(served, "admitted")[-1] == "urgent"
    served.finish()
    for name, prompt in prompts.items():
        assert served.tokens(name) == direct(prompt, 4)
    assert served.tokens("urgent") == direct([7] * 6, 4)


@pytest.mark.parametrize("limited_by", ["slots", "blocks"])
@pytest.mark.parametrize("policy", [fcfs, equals])
def test_equals_never_displace(policy, limited_by: str) -> None:
    slots, blocks = (2, 40) if limited_by == "slots" else (8, 6)
    served = Served(
        config(4, 1, 1, num_blocks=blocks, max_num_seqs=slots), policy=policy()
    )
    served.add("a", [1] * 9, 3, arrival_time=0.0)
    served.add("b", [2] * 9, 3, arrival_time=0.0)
    served.step()
    served.add("earlier", [3] * 9, 3, arrival_time=-1.0)
    served.finish()
    assert not served.of("preempted")
    assert order(served, "finished") == ["a", "b", "earlier"]


def test_nobody_is_displaced_in_vain() -> None:
    """What evicting and displacing give together must be enough, or none is lost."""
    served = Served(config(4, 1, 1, num_blocks=8, max_num_seqs=8), policy=by_priority())
    served.add("same", [1] * 17, 4, priority=0)  # 5 blocks
    served.add("low", [2] * 5, 4, priority=1)  # 2 blocks
    served.step()
    served.add("big", [3] * 13, 2, priority=0)  # 4: one is free, two are low's
    served.step()
    served.step()
    assert not served.of("preempted")
    assert len(served.tokens("low")) == 3
    served.finish()
    assert not served.of("preempted")
    assert order(served, "finished")[-1] == "big"


def test_evicting_comes_before_displacing() -> None:
    served = Served(config(4, 1, 1, num_blocks=8, max_num_seqs=8), policy=by_priority())
    served.run("cached", [9] * 16, 1)  # four idle blocks
    served.add("low", [1] * 12, 2, priority=1)  # three or four
    served.step()
    assert served.stats()["free_blocks"] == 1
    served.add("urgent", [2] * 14, 1, priority=0)  # four: three by evicting
    served.step()
    assert not served.of("preempted") and served.tokens("urgent")
    served.finish()
    assert served.tokens("low") == direct([1] * 12, 2)


def test_what_the_displaced_still_needed_is_needed_no_more() -> None:
    served = Served(
        config(4, 1, 1, num_blocks=8, max_num_seqs=8, max_chunk_tokens=4),
        policy=by_priority(),
    )
    served.add("low", [1] * 24, 1, priority=1)  # one block of six so far
    served.step()
    served.add("urgent", [2] * 20, 1, priority=0)  # five: they do not fit together
    served.step()
    assert order(served, "preempted") == ["low"]
    assert order(served, "admitted") == ["low", "urgent"]
    served.finish()
    assert order(served, "finished") == ["urgent", "low"]


def test_the_displaced_are_enough_and_the_shared_are_no_gain() -> None:
    """Blocks that stay pinned by others are not counted as what a victim gives."""
    served = Served(config(4, 1, 1, num_blocks=8, max_num_seqs=8), policy=by_priority())
    shared = list(range(12))
    served.run("first", shared, 1)  # three blocks cached
    served.add("holds", [*shared, 1], 8, priority=0)  # 3 shared, 1 or 2 of its own
    served.add("low", [*shared, 2], 8, priority=1)  # 3 shared, 1 or 2 of its own
    served.step()
    assert served.stats()["free_blocks"] == 3
    # Free 3, and low's one: 4 < 5, although low has 4 columns.
    served.add("big", [50 + i for i in range(17)], 1, priority=0)
    served.step()
    assert not served.of("preempted") and not served.of("admitted", "big")
    served.finish()
    assert served.tokens("big") == direct([50 + i for i in range(17)], 1)


@pytest.mark.parametrize(("launches", "steps"), SCHEDULES)
def test_a_preempted_request_goes_before_its_equals(launches: int, steps: int) -> None:
    served = Served(
        config(4, launches, steps, num_blocks=40, max_num_seqs=2), policy=equals()
    )
    served.add("a", [1] * 5, 9, priority=1)
    served.add("b", [2] * 5, 9, priority=1)
    served.step()
    served.add("c", [3] * 5, 9, priority=1)
    served.add("urgent", [4], 2, priority=0)
    served.finish()
    admitted = order(served, "admitted")
    assert order(served, "preempted") == ["b"]
    assert admitted == ["a", "b", "urgent", "b", "c"]


# Growth -------------------------------------------------------------------------------


def test_growth_takes_from_the_farthest_behind_and_the_last_sits_out() -> None:
    served = Served(config(4, 1, 1, num_blocks=3, max_num_seqs=4))
    for name in ("a", "b", "c"):
        served.add(name, [ord(name) - 96] * 3, 6)  # 8 rows: two blocks
    served.step()
    served.step()
    assert rows(served) == [3, 3] and served.stats()["free_blocks"] == 0
    served.add("d", [9], 1)
    served.step()  # each needs a second block
    assert order(served, "preempted") == ["c"]
    assert rows(served)[2] == 1  # a has c's block; b is the last, and sits out
    assert len(served.tokens("a")) == 3 and len(served.tokens("b")) == 2
    assert served.stats()["running"] == 2  # b holds its block
    # Nobody is admitted in a plan that preempted for memory, however small.
    assert not served.of("admitted", "d")
    served.finish()
    assert order(served, "preempted") == ["c"]
    assert order(served, "admitted") == ["a", "b", "c", "c", "d"]
    for name in ("a", "b", "c"):
        assert served.tokens(name) == direct([ord(name) - 96] * 3, 6)


@pytest.mark.parametrize("seed", range(12))
def test_under_fcfs_only_growth_preempts_and_only_those_behind(seed: int) -> None:
    rng = random.Random(seed)
    jobs = serving.workload(seed, 20, spread_s=rng.choice([0.0, 0.2]))
    served = Served(
        config(
            size := rng.choice([1, 2, 4]),
            rng.choice([1, 2, 3]),
            rng.choice([1, 4]),
            num_blocks=46 // size,
            max_num_seqs=6,
        )
    )
    serve(served, jobs)
    place = {f"{i}": (job.arrival_s, i) for i, job in enumerate(jobs)}
    running: set[str] = set()
    lost_in_plan = None
    for event in served.events:
        name = event.request_id or ""
        if event.kind == "admitted":
            assert lost_in_plan is None, "admitted in a plan that preempted"
            running.add(name)
        elif event.kind == "preempted":
            # The farthest behind goes; whoever grew is ahead of it.
            assert place[name] == max(place[r] for r in running)
            running.remove(name)
            assert running
            lost_in_plan = name
        elif event.kind == "finished":
            running.discard(name)
        if event.kind in ("progressed", "launch"):  # the plan has been submitted
            lost_in_plan = None


# Time ---------------------------------------------------------------------------------


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


# What a policy is told ----------------------------------------------------------------


def test_a_policy_hears_whole_lives_of_requests_and_nothing_else() -> None:
    """First that it arrived, last that it finished: so a map by index can be exact."""
    heard: list = []

    def update(state, events):
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
    assert kinds == {"arrived", "admitted", "progressed", "preempted", "finished"}
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

    policy = fcfs()._replace(rank=rank, update=lambda state, events: (state, None))
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
