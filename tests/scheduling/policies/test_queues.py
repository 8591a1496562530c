"""HRRN, priority and EDF: their textbook examples, by hand, and who gives way."""

from __future__ import annotations

import math
import random

import pytest

from jaxserve.scheduling.policies import edf, fcfs, hrrn, priority
from tests.engine.harness import Served, config, order
from tests.scheduling.policies.views import BLANK, ranked, views
from tests.serving import direct

# HRRN -----------------------------------------------------------------------------


def test_hrrn_ranks_by_the_ratio_worked_out_by_hand() -> None:
    """Service 100, 10 and 20 tokens; (wait + service) / service at three times."""
    requests = views(
        a={"arrival_s": 0.0, "prompt_tokens": 90, "max_output_tokens": 10},
        b={"arrival_s": 8.0, "prompt_tokens": 6, "max_output_tokens": 4},
        c={"arrival_s": 9.0, "prompt_tokens": 16, "max_output_tokens": 4},
    )
    assert ranked(hrrn(), requests, 10.0) == "bac"  # 1.10, 1.20, 1.05
    assert ranked(hrrn(), requests, 12.0) == "bca"  # 1.12, 1.40, 1.15
    # a and c are equal where t / 100 = (t - 9) / 20, at 11.25 s.
    assert ranked(hrrn(), requests, 11.24) == "bac"
    assert ranked(hrrn(), requests, 11.26) == "bca"
    for name, ratio in {"a": 1.12, "b": 1.4, "c": 1.15}.items():
        klass, (_, negative, *_) = hrrn().rank(None, requests[name], 12.0)
        assert klass == 0 and negative == pytest.approx(1 - ratio)


def test_hrrn_is_ranked_at_every_plan_while_it_waits() -> None:
    policy = hrrn()
    assert policy.until(None, BLANK, 3.5) == 3.5
    running = BLANK._replace(running=True)
    assert policy.until(None, running, 3.5) is None
    assert policy.rank(None, running, 3.5) == policy.rank(None, running, 9.0)


@pytest.mark.parametrize(
    ("arrival_s", "expected"),
    [(0.0262, ["first", "short", "long"]), (0.0263, ["first", "long", "short"])],
)
def test_hrrn_lets_a_short_one_pass_until_the_long_has_waited_in_proportion(
    arrival_s: float, expected: list[str]
) -> None:
    """At 30 ms the long one's wait / service is 30 / 40; the short one's is x / 5, with
    x = 3.75 ms if it came at 26.25 ms."""
    served = Served(config(4, 1, 1, num_blocks=40, max_num_seqs=1), policy=hrrn())
    served.add("first", [1] * 20, 1, arrival_time=0.0)  # 10 + 20 ms
    served.add("long", [2] * 30, 10, arrival_time=0.0)
    served.add("short", [3] * 4, 1, arrival_time=arrival_s)
    served.finish()
    assert order(served, "admitted") == expected
    starts = served.of("admitted", expected[1])
    assert [e.time_s for e in starts] == pytest.approx([0.030])
    assert not served.of("preempted")


# Priority -------------------------------------------------------------------------


def test_priority_takes_the_lowest_number_then_the_first_to_come() -> None:
    served = Served(config(4, 1, 1, num_blocks=40, max_num_seqs=1), policy=priority())
    for name, number in {"a": 2, "b": 0, "c": 1, "d": 0, "e": -1}.items():
        served.add(name, [1, 2], 1, priority=number, arrival_time=0.0)
    served.finish()
    assert order(served, "admitted") == ["e", "b", "d", "c", "a"]


@pytest.mark.parametrize("aging_s", [None, 100.0])
@pytest.mark.parametrize("limited_by", ["slots", "blocks"])
@pytest.mark.parametrize("launches", [1, 2])
def test_a_strictly_higher_priority_displaces_a_running_lower_one(
    launches: int, limited_by: str, aging_s: float | None
) -> None:
    """Three of 3 blocks each run, one at a higher priority; the farthest gives way."""
    slots, blocks = (3, 40) if limited_by == "slots" else (8, 9)
    served = Served(
        config(4, launches, 1, num_blocks=blocks, max_num_seqs=slots),
        policy=priority(aging_s),
    )
    for name, number in {"a": 1, "b": 3, "c": 2}.items():
        served.add(name, [ord(name) - 96] * 9, 3, priority=number)
    served.step()
    assert sorted(order(served, "admitted")) == ["a", "b", "c"]
    served.add("urgent", [7] * 9, 3, priority=0)
    served.step()
    assert order(served, "preempted") == ["b"]
    assert order(served, "admitted")[-1] == "urgent"
    served.finish()
    assert order(served, "preempted") == ["b"]
    for name in "abc":
        assert served.tokens(name) == direct([ord(name) - 96] * 9, 3)


@pytest.mark.parametrize("aging_s", [None, 100.0])
@pytest.mark.parametrize("limited_by", ["slots", "blocks"])
def test_an_equal_priority_displaces_nobody(
    limited_by: str, aging_s: float | None
) -> None:
    slots, blocks = (2, 40) if limited_by == "slots" else (8, 6)
    served = Served(
        config(4, 1, 1, num_blocks=blocks, max_num_seqs=slots),
        policy=priority(aging_s),
    )
    served.add("a", [1] * 9, 3, priority=1, arrival_time=0.0)
    served.add("b", [2] * 9, 3, priority=1, arrival_time=0.0)
    served.step()
    served.add("equal", [3] * 9, 3, priority=1, arrival_time=-1.0)
    served.add("lower", [4] * 9, 3, priority=2, arrival_time=-1.0)
    served.finish()
    assert not served.of("preempted")
    assert order(served, "finished") == ["a", "b", "equal", "lower"]


def test_a_request_gains_a_level_at_the_times_worked_out_by_hand() -> None:
    policy = priority(aging_s=10)
    view = BLANK._replace(priority=2, arrival_s=5.0)
    for running in (False, True):
        one = view._replace(running=running)
        levels = {5.0: 2, 14.999: 2, 15.0: 1, 24.999: 1, 25.0: 0, 34.999: 0, 35.0: -1}
        assert {t: policy.rank(None, one, t)[0] for t in levels} == levels
        times = {5.0: 15.0, 14.999: 15.0, 15.0: 25.0, 30.0: 35.0}
        assert {t: policy.until(None, one, t) for t in times} == times
    assert priority().until(None, view, 5.0) is None


@pytest.mark.parametrize("seed", range(3))
def test_a_level_changes_at_its_time_to_the_last_bit(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        policy = priority(aging_s=rng.choice([0.1, 0.3, 7.0, rng.random() + 1e-3]))
        view = BLANK._replace(
            priority=rng.randint(-3, 9), arrival_s=rng.random() * rng.choice([1, 1e4])
        )
        now_s = view.arrival_s + rng.random() * 50
        level = policy.rank(None, view, now_s)[0]
        at_s = policy.until(None, view, now_s)
        assert at_s is not None and at_s > now_s
        assert policy.rank(None, view, math.nextafter(at_s, 0))[0] == level
        assert policy.rank(None, view, at_s)[0] == level - 1


def test_ageing_keeps_every_two_requests_in_one_order() -> None:
    """By when each reaches level 0: a at 25 s, b at 24 s, c at 21 s, d at 25 s."""
    requests = views(
        a={"priority": 2, "arrival_s": 5.0},
        b={"priority": 0, "arrival_s": 24.0},
        c={"priority": 1, "arrival_s": 11.0},
        d={"priority": 1, "arrival_s": 15.0},
    )
    for tenths in range(240, 900):
        assert ranked(priority(aging_s=10), requests, tenths / 10) == "cbad"


def test_an_aged_request_lets_only_those_pass_that_reach_its_level_first() -> None:
    """One of priority 2 reaches level 0 at 200 ms. Newcomers of priority 0 come every
    10 ms and take 11 ms: the 20 that come before then go first, and no other."""
    admitted = {}
    for aging_s in (0.1, None):
        served = Served(
            config(4, 1, 1, num_blocks=40, max_num_seqs=1), policy=priority(aging_s)
        )
        served.add("low", [9], 1, priority=2, arrival_time=0.0)
        for i in range(40):
            served.add(f"{i}", [1], 1, priority=0, arrival_time=i / 100)
        served.finish()
        assert not served.of("preempted")
        admitted[aging_s] = order(served, "admitted").index("low")
    assert admitted == {0.1: 20, None: 40}


def test_aged_requests_do_not_ping_pong() -> None:
    """Levels of 20 ms, requests of 220 ms and more: the one that reaches level 0 first
    displaces the other once, and is never displaced by it."""
    served = Served(
        config(4, 1, 1, num_blocks=40, max_num_seqs=1), policy=priority(aging_s=0.02)
    )
    served.add("later", [1] * 4, 20, priority=1, arrival_time=0.0)  # 0 at 20 ms
    served.add("sooner", [2] * 4, 20, priority=0, arrival_time=0.012)
    served.finish()
    assert order(served, "preempted") == ["later"]
    assert order(served, "finished") == ["sooner", "later"]
    assert served.tokens("later") == direct([1] * 4, 20)


@pytest.mark.parametrize("aging_s", [0, -1.0, math.inf, math.nan, "10"])
def test_a_time_of_ageing_must_be_positive(aging_s) -> None:
    with pytest.raises(
        ValueError, match=r"aging_s=.* must be a number of seconds >= 1e-6"
    ):
        priority(aging_s)


# EDF ------------------------------------------------------------------------------


@pytest.mark.parametrize("preempt", [False, True])
def test_edf_takes_the_earliest_deadline_and_those_without_one_last(preempt) -> None:
    served = Served(config(4, 1, 1, num_blocks=40, max_num_seqs=1), policy=edf(preempt))
    due = {"a": None, "b": 5.0, "c": 2.0, "d": 5.0, "e": None, "f": 1e9}
    for name, deadline_s in due.items():
        served.add(name, [1, 2], 1, deadline_s=deadline_s, arrival_time=0.0)
    served.finish()
    assert order(served, "admitted") == ["c", "b", "d", "f", "a", "e"]


def _ends(policy) -> tuple[Served, dict[str, float]]:
    """Two jobs on one slot, in steps of 11 ms: 10 tokens by 300 ms, and 2 tokens that
    come at 20 ms and are due at 60 ms."""
    served = Served(config(4, 1, 1, num_blocks=40, max_num_seqs=1), policy=policy)
    served.add("long", [1], 10, arrival_time=0.0, deadline_s=0.3)
    served.add("short", [2], 2, arrival_time=0.02, deadline_s=0.06)
    served.finish()
    ends = {
        name: served.outputs[name].metrics.token_times_s[-1]
        for name in ("long", "short")
    }
    return served, ends


def test_preempting_edf_meets_deadlines_that_fcfs_misses() -> None:
    """The short one displaces the long at 22 ms and ends at 44. The long one computes
    its prompt and 2 tokens again, 13 ms, and 7 more tokens: 44 + 13 + 77 = 134 ms."""
    _, first_come = _ends(fcfs())
    assert first_come == pytest.approx({"long": 0.110, "short": 0.132})  # too late
    served, ends = _ends(edf(preempt=True))
    assert ends == pytest.approx({"short": 0.044, "long": 0.134})
    assert order(served, "preempted") == ["long"]


def test_edf_displaces_nobody_unless_asked() -> None:
    served, ends = _ends(edf())
    assert ends == pytest.approx({"long": 0.110, "short": 0.132})
    assert not served.of("preempted")


@pytest.mark.parametrize("limited_by", ["slots", "blocks"])
def test_an_equal_or_later_deadline_displaces_nobody(limited_by: str) -> None:
    slots, blocks = (1, 40) if limited_by == "slots" else (8, 4)
    served = Served(
        config(4, 1, 1, num_blocks=blocks, max_num_seqs=slots),
        policy=edf(preempt=True),
    )
    served.add("runs", [1] * 9, 5, deadline_s=3.0, arrival_time=0.0)
    served.step()
    served.add("equal", [2] * 9, 5, deadline_s=3.0, arrival_time=-1.0)
    served.add("later", [3] * 9, 5, deadline_s=4.0, arrival_time=-1.0)
    served.add("never", [4] * 9, 5, arrival_time=-1.0)
    served.step()
    assert not served.of("preempted")
    served.add("sooner", [5] * 9, 5, deadline_s=2.0)
    served.finish()
    assert order(served, "preempted") == ["runs"]
    assert order(served, "finished") == ["sooner", "equal", "runs", "later", "never"]


def test_edf_must_be_told_plainly_whether_to_preempt() -> None:
    with pytest.raises(ValueError, match="preempt=1 must be True or False"):
        edf(1)  # type: ignore[arg-type]
