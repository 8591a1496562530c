"""Policies made of policies: orders by hand, and bounded waits by a count of passes."""

from __future__ import annotations

import random

import pytest

from jaxserve.core import Event, Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.policies import (
    Policy,
    View,
    bounded_wait,
    chain,
    fcfs,
    priority,
)
from jaxserve.scheduling.ranking import Ranking
from tests.engine.harness import SCHEDULES, Served, config, serve
from tests.scheduling.policies.views import BLANK, ranked, views
from tests.serving import workload


def shortest() -> Policy:
    """Shortest prompt first, FCFS among equals."""
    return fcfs()._replace(
        rank=lambda state, view, now_s: (
            0,
            (view.prompt_tokens, view.arrival_s, view.index),
        )
    )


def newest() -> Policy:
    """Last come, first served: passes as often as it can."""
    return fcfs()._replace(
        rank=lambda state, view, now_s: (0, (-view.arrival_s, -view.index))
    )


# chain ----------------------------------------------------------------------------


def test_the_first_policy_decides_and_the_next_where_it_ties() -> None:
    requests = views(
        a={"priority": 1, "prompt_tokens": 2},
        b={"priority": 0, "prompt_tokens": 9},
        c={"priority": 1, "prompt_tokens": 1},
        d={"priority": 0, "prompt_tokens": 3},
        e={"priority": 0, "prompt_tokens": 9, "arrival_s": -1.0},
    )
    assert ranked(chain(priority(), shortest()), requests) == "debca"
    assert ranked(chain(shortest(), priority()), requests) == "cadeb"
    assert ranked(chain(priority()), requests) == ranked(priority(), requests)
    assert ranked(chain(fcfs(), shortest()), requests) == ranked(shortest(), requests)


def test_only_the_class_of_the_first_policy_displaces() -> None:
    view = BLANK._replace(index=4, arrival_s=2.0, priority=7, prompt_tokens=5)
    one, other = chain(priority(), shortest()), chain(shortest(), priority())
    assert one.rank(one.init(), view, 0.0) == (7, (0, 5, 2.0, 4))
    assert other.rank(other.init(), view, 0.0) == (0, (5, 7, 2.0, 4))


def test_a_chain_takes_the_least_quantum_and_the_earliest_time() -> None:
    def one(quantum: int | None, until_s: float | None) -> Policy:
        return fcfs()._replace(
            allow=lambda state, view: quantum, until=lambda state, view, now_s: until_s
        )

    for ones, quantum, until_s in (
        ([one(None, None), one(None, None)], None, None),
        ([one(None, 3.0), one(5, None)], 5, 3.0),
        ([one(7, 3.0), one(5, 2.0), one(None, 9.0)], 5, 2.0),
        ([one(0, 0.0), one(5, None)], 0, 0.0),
    ):
        policy = chain(*ones)
        assert policy.allow(policy.init(), BLANK) == quantum
        assert policy.until(policy.init(), BLANK, 0.0) == until_s


def test_a_chain_keeps_each_state_and_joins_what_is_stale() -> None:
    def counting(stale) -> Policy:
        return fcfs()._replace(
            init=lambda: 0,
            update=lambda state, events, view_of: (state + len(events), stale),
        )

    events = [Event("progressed", 0.0, "x", {"index": 1})] * 3
    policy = chain(counting({1}), fcfs(), counting((2, 1)))
    state, stale = policy.update(policy.init(), events, lambda index: BLANK)
    assert state == (3, None, 3) and stale == {1, 2}
    policy = chain(counting({1}), counting(None))
    assert policy.update(policy.init(), events, lambda index: BLANK)[1] is None


def test_what_policies_leave_out_is_left_out_of_their_combination() -> None:
    plain = fcfs()
    both = chain(plain, priority())
    assert both[2:] == plain[2:]  # update, until and allow
    assert bounded_wait(plain, 3)[3:] == plain[3:]
    assert chain(plain, priority(10)).until is not plain.until


def test_a_chain_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least"):
        chain()


# bounded_wait ---------------------------------------------------------------------


class OneSlot:
    """Admits the first in rank, one a plan, on the product's ranking."""

    def __init__(self, policy: Policy):
        self.ranking = Ranking(policy, self._view)
        self.running: set[int] = set()
        self.count = 0

    def _view(self, request: Request) -> View:
        return BLANK._replace(
            index=request.index,
            arrival_s=request.arrival_s,
            prompt_tokens=len(request.prompt),
            priority=request.priority,
            running=request.index in self.running,
        )

    def _note(self, kind: str, request: Request, **data: object) -> None:
        self.ranking.note(Event(kind, 0.0, "", {"index": request.index, **data}))

    def add(self, arrival_s: float, length: int, priority: int = 0) -> Request:
        request = Request(
            "",
            self.count,
            [1] * length,
            SamplingParams(),
            max_output_tokens=1,
            arrival_s=arrival_s,
            priority=priority,
        )
        self.count += 1
        self.ranking.add(request)
        self._note("arrived", request)
        return request

    def admit(self) -> Request:
        self.ranking.refresh(0.0)
        request = self.ranking.waiting()[0]
        self.running = {request.index}
        self._note("admitted", request, first=True)
        self.ranking.touch(request)
        return request

    def end(self, request: Request) -> None:
        self.running.discard(request.index)
        self.ranking.remove(request)
        self._note("finished", request)


@pytest.mark.parametrize("skip_limit", [0, 1, 2, 5])
@pytest.mark.parametrize("policy", [newest, shortest])
@pytest.mark.parametrize("seed", range(4))
def test_a_wait_is_bounded_as_by_counting_every_pass(
    seed: int, policy, skip_limit: int
) -> None:
    """Against the rule itself: those passed skip_limit times first, in order of
    arrival, else the first of the policy; every later arrival admitted is a pass."""
    rng = random.Random(seed)
    slot = OneSlot(bounded_wait(policy(), skip_limit))
    key = {
        newest: lambda r: (-r.arrival_s, -r.index),
        shortest: lambda r: (len(r.prompt), r.arrival_s, r.index),
    }[policy]
    waiting: dict[Request, int] = {}  # how often each was passed
    most, now_s = 0, 0.0
    for _ in range(300):
        for _ in range(rng.choice([0, 0, 1, 1, 3])):
            now_s += rng.choice([0.0, 0.5])
            waiting[slot.add(now_s, rng.randint(1, 30))] = 0
        if waiting and rng.random() < 0.1:  # one gives up
            slot.end(gone := rng.choice(list(waiting)))
            del waiting[gone]
        if not waiting:
            continue
        passed = [r for r, times in waiting.items() if times >= skip_limit]
        first = min(passed, key=lambda r: (r.arrival_s, r.index), default=None)
        expected = first or min(waiting, key=key)
        admitted = slot.admit()
        assert admitted is expected
        del waiting[admitted]
        for other in waiting:
            earlier = (other.arrival_s, other.index)
            waiting[other] += earlier < (admitted.arrival_s, admitted.index)
        most = max([most, *waiting.values()])
        slot.end(admitted)
    assert most == skip_limit


def test_a_smaller_class_passes_whatever_the_limit() -> None:
    slot = OneSlot(bounded_wait(priority(), 1))
    low = slot.add(0.0, 1, priority=1)
    urgent = [slot.add(1.0, 1) for _ in range(3)]
    also_low = slot.add(2.0, 1, priority=1)
    for expected in (*urgent, low, also_low):
        admitted = slot.admit()
        assert admitted is expected
        slot.end(admitted)


def test_only_those_just_passed_are_stale_and_nothing_is_left_over() -> None:
    policy = bounded_wait(newest(), 2)
    places = {i: BLANK._replace(index=i, arrival_s=float(i)) for i in range(6)}
    state = policy.init()

    def tell(kind: str, *indices: int, **data: object):
        nonlocal state
        events = [Event(kind, 0.0, "", {"index": i, **data}) for i in indices]
        state, stale = policy.update(state, events, places.__getitem__)
        return stale

    assert tell("arrived", *range(6)) == set()
    assert tell("progressed", 3) == set()
    assert tell("admitted", 5, first=True) == set()
    assert tell("admitted", 5, first=False) == set()  # it came back: not again a pass
    assert tell("admitted", 3, first=True) == {0, 1, 2}
    assert tell("admitted", 4, first=True) == {3}
    assert [policy.rank(state, places[i], 0.0)[1][0] for i in range(6)] == [
        *[0] * 4,
        *[1] * 2,
    ]
    assert tell("finished", 0, 1, 2, 3, 4) == set()
    assert tell("finished", 5) == set()
    assert state == policy.init()


@pytest.mark.parametrize(("launches", "steps"), SCHEDULES)
@pytest.mark.parametrize("seed", range(3))
def test_a_bound_holds_on_an_engine_that_admits_several_a_plan(
    seed: int, launches: int, steps: int
) -> None:
    limit, slots = 3, 3
    jobs = workload(seed, 40, spread_s=0.05)
    served = Served(
        config(4, launches, steps, num_blocks=60, max_num_seqs=slots),
        policy=bounded_wait(newest(), limit),
    )
    serve(served, jobs)
    first = [e for e in served.of("admitted") if e.data["first"]]
    places = [(jobs[i].arrival_s, i) for i in (e.data["index"] for e in first)]
    passes = [
        sum(other > place for other in places[:at]) for at, place in enumerate(places)
    ]
    assert limit <= max(passes) <= limit + slots - 1


@pytest.mark.parametrize("skip_limit", [-1, 1.5, True, None, "3"])
def test_a_limit_must_be_a_whole_number(skip_limit) -> None:
    with pytest.raises(ValueError, match=r"skip_limit=.* must be an integer >= 0"):
        bounded_wait(fcfs(), skip_limit)
