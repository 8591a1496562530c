"""MLFQ: demotions and boosts by hand, quanta never overshot, and who passes whom."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxserve import Engine, EngineConfig
from jaxserve.core import Event
from jaxserve.executors.sim_executor import SimExecutor, Truth
from jaxserve.models.hash_model import HashModel
from jaxserve.scheduling.policies import Policy, View
from jaxserve.scheduling.policies.mlfq import mlfq
from tests.engine.harness import order
from tests.scheduling.policies.seconds import (
    Job,
    Watch,
    arrivals,
    displaced,
    ends_s,
    serve,
)
from tests.scheduling.policies.views import BLANK
from tests.serving import greedy


def level(policy, state, view: View, now_s: float = 0.0) -> float:
    return policy.rank(state, view, now_s)[0]


def progress(index: int, tokens: int, time_s: float) -> Event:
    data = {"index": index, "prompt_tokens": 0, "output_tokens": tokens}
    return Event("progressed", time_s, f"{index}", data)


# Levels and quanta ----------------------------------------------------------------


def test_levels_and_allowances_at_every_output_length() -> None:
    """Quanta of 2, 3 and 4 tokens end at 2, 5 and 9."""
    policy = mlfq((2, 3, 4), boost_interval_s=None)
    at = [BLANK._replace(output_tokens=n) for n in range(11)]
    levels = [level(policy, policy.init(), view) for view in at]
    assert levels == [0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 3]
    allowed = [policy.allow(policy.init(), view) for view in at]
    assert allowed == [2, 1, 3, 2, 1, 4, 3, 2, 1, None, None]
    assert [policy.until(policy.init(), view, 5.0) for view in at] == [None] * 11


def test_demotions_by_hand() -> None:
    """One slot, quanta 2 and 4. a drops to level 1 at 2 s and gives way to b, which
    drops at 4 s to a's level and goes on: equals do not displace. c displaces a."""
    jobs = {"a": Job(10), "b": Job(3, arrival_s=1.0), "c": Job(1, arrival_s=6.0)}
    served = serve(mlfq((2, 4), boost_interval_s=None), jobs)
    assert displaced(served) == [("a", 2.0), ("a", 6.0)]
    assert ends_s(served) == {"b": 5.0, "c": 7.0, "a": 14.0}


def test_within_a_level_by_arrival() -> None:
    """All drop to level 1 after a token, and end there in the order they came."""
    jobs = {name: Job(3, arrival_s=t) for name, t in zip("abcd", range(4), strict=True)}
    served = serve(mlfq((1, 9), boost_interval_s=None), jobs)
    # 0-1 a; 1-2 b; 2-3 c; 3-4 d; then level 1: d runs, and equals do not displace it.
    assert [name for name, _ in displaced(served)] == ["a", "b", "c"]
    assert ends_s(served) == {"d": 6.0, "a": 8.0, "b": 10.0, "c": 12.0}


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("launches", [1, 2, 3])
def test_a_quantum_is_never_overshot(steps: int, launches: int) -> None:
    """With several steps a launch and launches planned ahead, every boundary of levels
    is met exactly, and the levels that follow are right."""
    jobs = {name: Job(20, arrival_s=0.0) for name in "abc"}
    served = serve(
        mlfq((3, 7), boost_interval_s=None),
        jobs,
        max_num_seqs=2,
        num_scheduler_steps=steps,
        launches_in_flight=launches,
    )
    for name in jobs:
        total, reached = 0, set()
        for event in served.of("progressed", name):
            total += event.data["output_tokens"]
            reached.add(total)
        assert {3, 10, 20} <= reached
    # c is let in as soon as a or b has spent its three tokens.
    first = served.of("progressed", "c")[0]
    for name in ("a", "b"):
        before = [
            e.data["output_tokens"]
            for e in served.of("progressed", name)
            if e.time_s < first.time_s - steps
        ]
        assert sum(before) <= 3


def test_skip_join_starts_where_the_quantum_covers_the_prompt() -> None:
    policy = mlfq((2, 4, 8), boost_interval_s=None, skip_join=True)
    starts = {1: 0, 2: 0, 3: 1, 4: 1, 5: 2, 8: 2, 9: 3, 500: 3}
    for prompt_tokens, expected in starts.items():
        view = BLANK._replace(prompt_tokens=prompt_tokens)
        assert level(policy, policy.init(), view) == expected
    # It has the whole quantum of the level at which it starts.
    late = BLANK._replace(prompt_tokens=3, output_tokens=3)
    assert level(policy, policy.init(), late) == 1
    assert policy.allow(policy.init(), late) == 1
    spent = late._replace(output_tokens=4)
    assert level(policy, policy.init(), spent) == 2
    jobs = {"long": Job(2, prompt_tokens=9), "short": Job(2, prompt_tokens=2)}
    assert order(serve(policy, jobs), "admitted")[0] == "short"


# Boosts ---------------------------------------------------------------------------


def test_a_boost_lifts_all_and_itself_displaces_nobody_by_hand() -> None:
    """One slot, one quantum of 2, a boost every 5 s. a drops at 2 s and goes on until b
    displaces it at 4 s. The boost at 5 s makes both equal: b has put out 1 token, goes
    on for 4, and drops at 9 s; a, lifted with 4 for 16, displaces it. The boost at 10 s
    makes them equal again, with 5 each: a goes on for 20, and ends at 25 s."""
    jobs = {"a": Job(20), "b": Job(20, arrival_s=4.0)}
    served = serve(mlfq((2,), boost_interval_s=5.0), jobs)
    assert displaced(served) == [("a", 4.0), ("b", 9.0)]
    assert ends_s(served) == {"a": 25.0, "b": 40.0}


def boosted(policy, output: dict[int, int], time_s: float, before_s: float = 0.5):
    """The state after requests of these output lengths lived through a boost."""
    jobs = {f"{i}": Job(99) for i in output}
    state, _ = policy.update(policy.init(), arrivals(jobs), {}.get)
    events = [progress(i, n, before_s) for i, n in output.items()]
    state, stale = policy.update(state, events, {}.get)
    assert list(stale) == []
    state, stale = policy.update(state, [progress(0, 0, time_s)], {}.get)
    assert stale is None
    return state


def test_who_is_lifted_stays_for_what_pays_for_it() -> None:
    """Quanta 1, 3 and 5. Who has put out nothing is a newcomer still. Others stay for 5
    tokens, or for 4 times those they had, and then drop one level, to level 1."""
    policy = mlfq((1, 3, 5), boost_interval_s=10.0)
    stays = {0: 1, 1: 5, 2: 12, 3: 20, 4: 120}
    outputs = {0: 0, 1: 1, 2: 3, 3: 5, 4: 30}
    state = boosted(policy, outputs, 10.0)
    for index, tokens in outputs.items():
        view = BLANK._replace(index=index, output_tokens=tokens)
        assert level(policy, state, view, 10.0) == 0
        assert policy.allow(state, view) == stays[index]
        last = view._replace(output_tokens=tokens + stays[index] - 1)
        assert level(policy, state, last, 10.0) == 0
        assert policy.allow(state, last) == 1
        spent = view._replace(output_tokens=tokens + stays[index])
        assert level(policy, state, spent, 10.0) == 1
        assert policy.allow(state, spent) == 3
        again = view._replace(output_tokens=tokens + stays[index] + 3 + 5)
        assert level(policy, state, again, 10.0) == 3


def test_a_boost_lifts_who_joined_low() -> None:
    policy = mlfq((2, 4), boost_interval_s=10.0, skip_join=True)
    jobs = {"a": Job(9, prompt_tokens=4), "b": Job(9, prompt_tokens=9)}
    views = [BLANK._replace(index=i, prompt_tokens=p) for i, p in enumerate((4, 9))]
    state, _ = policy.update(policy.init(), arrivals(jobs), {}.get)
    assert [level(policy, state, view) for view in views] == [1, 2]
    state, _ = policy.update(state, [progress(0, 0, 10.0)], {}.get)
    assert [level(policy, state, view, 10.0) for view in views] == [0, 0]
    assert [policy.allow(state, view) for view in views] == [2, 2]


def test_newcomers_pass_who_was_lifted_for_ten_intervals() -> None:
    policy = mlfq((2, 4), boost_interval_s=10.0)
    lifted = BLANK._replace(index=0, arrival_s=0.0, output_tokens=3)
    for time_s, passes in ((10.0, True), (90.0, True), (100.0, False)):
        state = boosted(policy, {0: 3}, time_s)
        new = BLANK._replace(index=1, arrival_s=time_s)
        first = policy.rank(state, new, time_s) < policy.rank(state, lifted, time_s)
        assert first == passes
        assert level(policy, state, new, time_s) == 0
        assert level(policy, state, lifted, time_s) == 0


def test_a_rank_is_right_at_the_instant_of_a_boost_before_any_event() -> None:
    policy = mlfq((2, 4), boost_interval_s=10.0)
    state, _ = policy.update(policy.init(), arrivals({"a": Job(9)}), {}.get)
    state, _ = policy.update(state, [progress(0, 7, 1.0)], {}.get)
    view = BLANK._replace(output_tokens=7)
    assert level(policy, state, view, 9.999) == 2
    assert policy.until(state, view, 9.999) == 10.0
    assert level(policy, state, view, 10.0) == 0
    assert policy.until(state, view, 10.0) == 20.0


def test_boosts_come_at_multiples_of_the_interval_also_when_some_are_missed() -> None:
    policy = mlfq((2,), boost_interval_s=0.1)
    state = boosted(policy, {0: 3}, 7.25, before_s=0.05)
    view = BLANK._replace(output_tokens=3)
    assert policy.until(state, view, 7.25) == pytest.approx(7.3)
    # 3 * 0.1 is above 0.3 in floating point: a boost due is never in the past.
    for n in range(1, 200):
        state = boosted(policy, {0: 3}, n * 0.1, before_s=0.05)
        due_s = policy.until(state, view, n * 0.1)
        assert due_s is not None and n * 0.1 < due_s <= (n + 1) * 0.1


def test_nobody_starves_and_nothing_is_kept() -> None:
    """A long request and a short one every second, which fill the slot: without boosts
    the long one makes no token after its first quantum. With them it goes first from
    the tenth boost on, at 50 s, with 2 tokens: for 8 more, and for the rest at 55 s."""
    jobs = {"long": Job(12)}
    jobs |= {f"{t}": Job(1, arrival_s=float(t)) for t in range(1, 80)}

    def end_s(boost_interval_s: float | None) -> float:
        watch = Watch(mlfq((2, 4), boost_interval_s=boost_interval_s))
        served = serve(watch.policy, jobs)
        assert watch.state.output == {} and watch.state.zero == {}
        return ends_s(served)["long"]

    assert end_s(None) > 80
    assert end_s(5.0) == 60.0


class _Floored:
    """A step of an 8B model: reading the weights hides the first 187 tokens."""

    def step_s(self, chunk_tokens: int, rows: int, context_tokens: int) -> float:
        tokens_s = 8e-5 * (chunk_tokens + rows)
        return max(0.015, tokens_s) + 8.2e-8 * context_tokens


def heavy_tailed(policy: Policy, n: int = 2000) -> tuple[float, float]:
    """Output tokens a second, and the longest pause of any request, in seconds: Poisson
    arrivals at 1.19 of what 64 slots can serve, lognormal outputs of CV^2 2."""
    rng = np.random.default_rng(0)
    output = np.clip(rng.lognormal(math.log(180), 1.14, n), 1, 4096).astype(int)
    prompt = np.clip(rng.lognormal(math.log(70), 1.2, n), 1, 2048).astype(int)
    arrival_s = np.cumsum(rng.exponential(1 / 10.8, n))
    truth = {i: Truth([1] * int(k), True) for i, k in enumerate(output)}
    model = HashModel()
    engine = Engine(
        model,
        model.init_params(),
        EngineConfig(
            max_model_len=6400, num_blocks=64 * 400, enable_prefix_caching=False
        ),
        policy,
        executor=lambda _, __, shape: SimExecutor(shape, truth, _Floored(), jump=True),  # type: ignore[arg-type]
    )
    params = greedy(4096, output_kind="final_only")
    for i in range(n):
        at_s = float(arrival_s[i])
        engine.add_request(f"{i}", [2] * int(prompt[i]), params, arrival_time=at_s)
    pause_s = 0.0
    while engine.has_unfinished_requests():
        for ended in engine.step():
            times_s = ended.metrics.token_times_s
            pause_s = max(pause_s, np.diff(times_s).max(initial=0.0))
    return output.sum() / engine.now(), pause_s


@pytest.mark.slow
def test_boosts_cost_little_throughput_under_overload() -> None:
    """Naive ones, every 10 s and with the first quantum alone, cost a third or more."""
    without, starved_s = heavy_tailed(mlfq(boost_interval_s=None))
    for boost_interval_s in (30.0, 10.0):
        tokens_per_s, pause_s = heavy_tailed(mlfq(boost_interval_s=boost_interval_s))
        assert tokens_per_s >= 0.95 * without
        assert pause_s < starved_s


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quanta": ()}, r"quanta=\(\) must hold integers >= 1"),
        ({"quanta": 32}, "quanta=32 must hold integers >= 1"),
        ({"quanta": (4, 0)}, r"quanta=\(4, 0\) must hold integers >= 1"),
        ({"boost_interval_s": 0.0}, "boost_interval_s=0.0 must be a number > 0"),
    ],
)
def test_mlfq_refuses_what_makes_no_sense(fields, message) -> None:
    with pytest.raises(ValueError, match=message):
        mlfq(**fields)


@pytest.mark.parametrize(("interval_s", "at_s"), [(1e-9, 1e9), (1e-3, 1e14)])
def test_a_clock_too_coarse_for_the_interval_boosts_at_every_plan(
    interval_s: float, at_s: float
) -> None:
    policy = mlfq(boost_interval_s=interval_s)
    due_s = policy.until(policy.init(), BLANK._replace(arrival_s=at_s), at_s)
    assert due_s is not None and due_s == math.nextafter(at_s, math.inf)
