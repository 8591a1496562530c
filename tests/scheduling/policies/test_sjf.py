"""SJF and SRPT: textbook schedules by hand, who gives way, and what is remembered."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from jaxserve.core import Event
from jaxserve.scheduling.policies import Policy, fcfs
from jaxserve.scheduling.policies.sjf import hrrn, sjf, srpt
from jaxserve.scheduling.predictors import LengthPredictor, history, oracle
from tests.engine.harness import order
from tests.scheduling.policies.seconds import (
    Job,
    Watch,
    arrivals,
    displaced,
    ends_s,
    lengths,
    serve,
)
from tests.scheduling.policies.views import BLANK


def told(guesses: Mapping[int, float]) -> LengthPredictor:
    """Guesses as given, which may be wrong."""
    return LengthPredictor(
        init=lambda: None,
        predict=lambda state, view: guesses[view.index],
        update=lambda state, events, view_of: state,
    )


# Shortest job first -------------------------------------------------------------------


def test_ten_two_and_one_tokens_as_in_the_paper() -> None:
    """vLLM-LTR's example: 1 s a token, one slot. In order of arrival they end at 10, 12
    and 13 s: 1, 6 and 13 s a token. Shortest first at 1, 3, 13: 1, 1.5 and 1.3."""
    jobs = {"a": Job(10), "b": Job(2), "c": Job(1)}

    def seconds_a_token(policy: Policy) -> list[float]:
        ends = ends_s(serve(policy, jobs))
        return [ends[name] / job.output_tokens for name, job in jobs.items()]

    first_come = seconds_a_token(fcfs())
    assert first_come == [1.0, 6.0, 13.0]
    assert sum(first_come) / 3 == pytest.approx(6.67, abs=0.005)
    shortest = seconds_a_token(sjf(oracle(lengths(jobs))))
    assert shortest == [1.3, 1.5, 1.0]
    assert sum(shortest) / 3 == pytest.approx(1.27, abs=0.005)


def test_sjf_displaces_nobody_and_serves_equals_as_they_came() -> None:
    jobs = {
        "long": Job(6),
        "b": Job(3, arrival_s=1.0),
        "c": Job(2, arrival_s=2.0),
        "d": Job(3, arrival_s=0.5),
        "e": Job(2, arrival_s=3.0),
    }
    served = serve(sjf(oracle(lengths(jobs))), jobs)
    assert ends_s(served) == {"long": 6.0, "c": 8.0, "e": 10.0, "d": 13.0, "b": 16.0}
    assert displaced(served) == []


def test_sjf_goes_by_the_guess_not_by_the_truth() -> None:
    jobs = {"a": Job(2), "b": Job(5), "c": Job(3)}
    served = serve(sjf(told({0: 9.0, 1: 1.0, 2: 4.0})), jobs)
    assert ends_s(served) == {"b": 5.0, "c": 8.0, "a": 10.0}


def test_hrrn_takes_the_guess_for_the_service() -> None:
    """Prompts of 1 token: service 1 + 8, 1 + 2 and 1 + 3 by the guess, and all ask for
    as much as there is. `first` ends at 5 s; then b has waited 3 / 3 of its service, a
    4 / 9 and c 0.5 / 4. At 7 s c has waited 2.5 / 4 and a 6 / 9."""
    jobs = {
        "first": Job(5),
        "a": Job(8, arrival_s=1.0),
        "b": Job(2, arrival_s=2.0),
        "c": Job(3, arrival_s=4.5),
    }
    guesses = {0: 5.0, 1: 8.0, 2: 2.0, 3: 3.0}
    served = serve(hrrn(told(guesses)), jobs)
    assert order(served, "finished") == ["first", "b", "a", "c"]
    # By arrival without a guess, for all ask for the same.
    assert order(serve(hrrn(), jobs), "finished") == ["first", "a", "b", "c"]


def test_who_lost_a_slot_keeps_its_place() -> None:
    policy = sjf(told({0: 8.0, 1: 9.0, 2: 7.0}))
    state, _ = policy.update(
        policy.init(),
        arrivals({"a": Job(8), "b": Job(9), "c": Job(7)}),
        lambda index: BLANK._replace(index=index),
    )

    def key(index: int, **fields):
        return policy.rank(state, BLANK._replace(index=index, **fields), 5.0)

    before = key(0)
    assert key(2) < before < key(1)
    assert key(0, output_tokens=6, preemptions=2) == before
    assert key(1, running=True) < key(2)  # who runs goes on first
    assert key(1, running=True)[0] == key(2)[0] == 0


def test_a_lack_of_memory_takes_the_longest() -> None:
    """Four blocks of four rows. The contexts of a and b fill two each when they hold
    8 rows, after 8 steps; b then goes, and comes back when a has ended."""
    jobs = {"a": Job(12), "b": Job(14)}
    served = serve(sjf(oracle(lengths(jobs))), jobs, max_num_seqs=2, num_blocks=4)
    assert [name for name, _ in displaced(served)] == ["b"]
    assert ends_s(served)["a"] == 12.0
    assert len(served.tokens("b")) == 14


def test_a_long_request_waits_for_all_shorter_ones_unless_its_wait_is_bounded() -> None:
    jobs = {"first": Job(1), "long": Job(9)}
    jobs |= {f"{i}": Job(1, arrival_s=float(i)) for i in range(20)}
    truth = oracle(lengths(jobs))
    free = order(serve(sjf(truth), jobs), "admitted")
    assert free.index("long") == 21
    bounded = order(serve(sjf(truth, skip_limit=5), jobs), "admitted")
    # `first` and `0` came no later than it did; `first` was submitted before it.
    passed = [name for name in bounded[: bounded.index("long")] if name != "first"]
    assert len(passed) == 5


def test_a_guess_is_made_at_arrival_and_what_is_learned_serves_later_ones() -> None:
    """Nothing is known when the first two come, so they are equals: both may put out
    63 tokens. When the next come, user "long" has ended with 6 and "short" with 1."""
    jobs = {
        "l1": Job(6, user="long"),
        "s1": Job(1, user="short"),
        "l2": Job(6, arrival_s=7.0, user="long"),
        "s2": Job(1, arrival_s=7.0, user="short"),
        "l3": Job(6, arrival_s=7.0, user="long"),
        "s3": Job(1, arrival_s=7.0, user="short"),
    }
    watch = Watch(sjf(history(key="user")))
    served = serve(watch.policy, jobs)
    assert order(served, "finished") == ["l1", "s1", "s2", "s3", "l2", "l3"]
    assert watch.state.tokens == {}
    assert watch.state.predictor.by_key["long"] == (6, 6, 6)
    assert watch.state.predictor.by_key["short"] == (1, 1, 1)


def test_learning_makes_no_key_stale() -> None:
    policy = sjf(history())
    jobs = {"a": Job(1, user="u"), "b": Job(1, user="u")}
    of = {i: BLANK._replace(index=i, user="u", max_output_tokens=50) for i in range(3)}
    state, stale = policy.update(policy.init(), arrivals(jobs), of.__getitem__)
    assert list(stale or ()) == []
    before = policy.rank(state, of[1], 0.0)
    data = {"index": 0, "reason": "stop", "output_tokens": 3}
    ended = Event("finished", 1.0, "a", data)
    state, stale = policy.update(state, [ended], of.__getitem__)
    assert list(stale or ()) == [] and policy.rank(state, of[1], 1.0) == before
    late = Event("arrived", 2.0, "c", {"index": 2, "prompt_tokens": 1, "user": "u"})
    state, _ = policy.update(state, [late], of.__getitem__)
    assert policy.rank(state, of[2], 2.0) < before  # 3 tokens against 50


# Shortest remaining first ----------------------------------------------------------


def test_srpt_displaces_for_the_shorter_remainder() -> None:
    """a has 8 tokens left when b comes with 3, at 2 s; then 6 when c comes with 5."""
    jobs = {"a": Job(10), "b": Job(3, arrival_s=2.0), "c": Job(5, arrival_s=7.0)}
    served = serve(srpt(oracle(lengths(jobs))), jobs)
    assert displaced(served) == [("a", 2.0), ("a", 7.0)]
    assert ends_s(served) == {"b": 5.0, "c": 12.0, "a": 18.0}
    assert ends_s(serve(sjf(oracle(lengths(jobs))), jobs)) == {
        "a": 10.0,
        "b": 13.0,
        "c": 18.0,
    }


def test_equal_remainders_never_displace() -> None:
    jobs = {"a": Job(10), "b": Job(8, arrival_s=2.0), "c": Job(6, arrival_s=3.0)}
    served = serve(srpt(oracle(lengths(jobs))), jobs)
    assert displaced(served) == [("a", 3.0)]  # 7 left against 6
    assert ends_s(served) == {"c": 9.0, "a": 16.0, "b": 24.0}


@pytest.mark.parametrize(
    ("preempt_until", "arrival_s", "gives_way"),
    [(0.5, 4.0, True), (0.5, 5.0, False), (0.8, 7.0, True), (0.0, 1.0, False)],
)
def test_a_request_gives_way_only_in_the_first_part_of_its_guess(
    preempt_until: float, arrival_s: float, gives_way: bool
) -> None:
    jobs = {"a": Job(10), "b": Job(1, arrival_s=arrival_s)}
    served = serve(srpt(oracle(lengths(jobs)), preempt_until), jobs)
    assert displaced(served) == ([("a", arrival_s)] if gives_way else [])


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_a_request_gives_way_so_many_times_and_no_more(limit: int) -> None:
    jobs = {"a": Job(40)} | {f"{t}": Job(1, arrival_s=float(t)) for t in (2, 5, 8)}
    served = serve(srpt(oracle(lengths(jobs)), max_preemptions=limit), jobs)
    assert displaced(served) == [("a", 2.0), ("a", 5.0)][:limit]


def test_who_outlived_its_guess_counts_as_nearly_done() -> None:
    policy = srpt(told({0: 4.0}))
    told_of = arrivals({"a": Job(9)})
    progress = [
        Event("progressed", 1.0, "a", {"index": 0, "output_tokens": n}) for n in (1, 6)
    ]
    state, _ = policy.update(policy.init(), told_of, lambda i: BLANK)
    assert policy.rank(state, BLANK, 0.0)[0] == 4.0
    state, stale = policy.update(state, progress[:1], lambda i: BLANK)
    assert policy.rank(state, BLANK, 0.0)[0] == 3.0 and set(stale or ()) == {0}
    assert policy.rank(state, BLANK._replace(running=True), 0.0)[0] == 3.0
    state, stale = policy.update(state, progress[1:], lambda i: BLANK)
    assert policy.rank(state, BLANK, 0.0)[0] == 1.0 and set(stale or ()) == {0}
    assert policy.rank(state, BLANK._replace(running=True), 0.0)[0] == 0.0
    runs = BLANK._replace(running=True)
    _, stale = policy.update(state, progress[:1], lambda i: runs)
    assert set(stale or ()) == set()  # it gives way to nobody, whatever it still does
    # Unless it lost its slot for memory, and waits by what is left of it.
    _, stale = policy.update(state, progress[:1], lambda i: BLANK)
    assert set(stale or ()) == {0}


@pytest.mark.parametrize("seed", range(4))
def test_bad_guesses_do_not_thrash(seed: int) -> None:
    rng = random.Random(seed)
    jobs = {
        f"{i}": Job(rng.randint(1, 30), float(rng.randint(0, 60)), rng.randint(1, 20))
        for i in range(40)
    }
    watch = Watch(srpt(oracle(lengths(jobs), noise=1.0), 1.0, max_preemptions=2))
    served = serve(watch.policy, jobs, max_num_seqs=3)
    times = {name: len(served.of("preempted", name)) for name in jobs}
    assert 0 < sum(times.values()) and max(times.values()) <= 2
    assert {n: len(served.tokens(n)) for n in jobs} == {
        n: job.output_tokens for n, job in jobs.items()
    }
    assert watch.state.guesses.tokens == {} and watch.state.output == {}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"preempt_until": 1.5}, r"preempt_until=1.5 must be in \[0, 1\]"),
        ({"max_preemptions": -1}, "max_preemptions=-1 must be an integer >= 0"),
    ],
)
def test_srpt_refuses_what_makes_no_sense(fields, message) -> None:
    with pytest.raises(ValueError, match=message):
        srpt(oracle({}), **fields)
