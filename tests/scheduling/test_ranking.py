"""The order of requests: ranked when a rank may differ, and as a sort would."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from jaxserve.core import Event, Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.policies import Policy, View, fcfs, get_policy
from jaxserve.scheduling.ranking import Ranking


class Queue:
    """A ranking, and who of its requests is running."""

    def __init__(self, policy: Policy):
        self.running: set[int] = set()
        self.ranked: list[int] = []  # every call of the policy's rank

        def rank(state, view, now_s):
            self.ranked.append(view.index)
            return policy.rank(state, view, now_s)

        self.ranking = Ranking(policy._replace(rank=rank), self.view)
        self.requests: dict[int, Request] = {}

    def view(self, request: Request) -> View:
        return View(
            index=request.index,
            arrival_s=request.arrival_s,
            prompt_tokens=len(request.prompt),
            output_tokens=len(request.output),
            max_output_tokens=request.max_output_tokens,
            cached_tokens=request.num_cached_tokens or 0,
            running=request.index in self.running,
            preemptions=request.preemptions,
            priority=request.priority,
            user=request.user,
            deadline_s=request.deadline_s,
            tags=request.tags,
            text=request.text,
        )

    def add(self, index: int, **fields) -> Request:
        request = Request(
            f"{index}", index, [1], SamplingParams(), max_output_tokens=4, **fields
        )
        self.requests[index] = request
        self.ranking.add(request)
        return request

    def order(self, now_s: float = 0.0) -> list[int]:
        self.ranking.refresh(now_s)
        return [request.index for request in self.ranking.in_order()]

    def switch(self, index: int, *, preempted: bool = False) -> None:
        """The request takes or loses a slot."""
        self.running ^= {index}
        self.requests[index].preemptions += preempted
        self.ranking.touch(self.requests[index])


def policy(
    rank: Callable[[object, View, float], tuple],
    until: Callable[[object, View, float], float | None] | None = None,
    update: Callable | None = None,
) -> Policy:
    base = fcfs()._replace(rank=rank)
    base = base._replace(until=until) if until else base
    return base._replace(update=update) if update else base


def event(index: int, kind: str = "progressed") -> Event:
    return Event(kind, 0.0, f"{index}", {"index": index})


def test_ties_go_to_the_running_then_the_preempted_then_the_first_submitted() -> None:
    queue = Queue(policy(lambda state, view, now_s: (view.priority, ())))
    for index in range(6):
        queue.add(index, priority=0)
    queue.add(6, priority=-1)
    assert queue.order() == [6, 0, 1, 2, 3, 4, 5]
    for index in (3, 4, 5):
        queue.switch(index)
    assert queue.order() == [6, 3, 4, 5, 0, 1, 2]
    queue.switch(5, preempted=True)
    queue.switch(4, preempted=True)
    assert queue.order() == [6, 3, 4, 5, 0, 1, 2]
    queue.switch(4)
    assert queue.order() == [6, 3, 4, 5, 0, 1, 2]
    queue.switch(3, preempted=False)
    assert queue.order() == [6, 4, 5, 0, 1, 2, 3]


def test_fcfs_keeps_the_place_of_who_was_preempted() -> None:
    queue = Queue(get_policy("fcfs"))
    for index, arrival_s in enumerate([0.3, 0.1, 0.2, 0.1]):
        queue.add(index, arrival_s=arrival_s)
    assert queue.order() == [1, 3, 2, 0]
    queue.switch(1)
    queue.switch(3)
    queue.switch(1, preempted=True)
    assert queue.order() == [1, 3, 2, 0]
    with pytest.raises(ValueError, match=r"'lifo' is unknown.* known are .*'fcfs'"):
        get_policy("lifo")


def test_the_class_comes_before_the_order_whatever_the_order() -> None:
    queue = Queue(
        policy(lambda state, view, now_s: (view.priority, (-view.arrival_s,)))
    )
    for index, (klass, arrival_s) in enumerate(
        [(1, 9.0), (0, 1.0), (1, 5.0), (0, 2.0)]
    ):
        queue.add(index, priority=klass, arrival_s=arrival_s)
    queue.switch(2)
    assert queue.order() == [3, 1, 0, 2]
    key = queue.ranking.key
    assert key(queue.requests[2]).klass == 1 and key(queue.requests[1]).klass == 0


def test_a_rank_changes_at_its_time_and_not_before() -> None:
    """An aged request moves up a class at arrival + 10, to the very instant."""

    def aged(state, view, now_s):
        return (0 if now_s >= view.arrival_s + 10 else 1, (view.index,))

    def until(state, view, now_s):
        at = view.arrival_s + 10
        return at if now_s < at else None

    queue = Queue(policy(aged, until))
    queue.add(0, arrival_s=5.0)
    queue.add(1, arrival_s=0.0)
    queue.switch(0)
    assert queue.order(5.0) == [0, 1]
    queue.ranked.clear()
    assert queue.order(9.999) == [0, 1] and queue.ranked == []
    assert queue.order(10.0) == [1, 0] and queue.ranked == [1]
    assert queue.order(14.999) == [1, 0] and queue.ranked == [1]
    assert queue.order(15.0) == [0, 1] and queue.ranked == [1, 0]
    assert queue.order(1e9) == [0, 1] and queue.ranked == [1, 0]


def test_a_rank_of_the_hour_is_computed_every_plan() -> None:
    """until = now, as for HRRN: also when the clock stands still."""
    queue = Queue(
        policy(
            lambda state, view, now_s: (0, (-(now_s - view.arrival_s) / view.index,)),
            lambda state, view, now_s: now_s,
        )
    )
    queue.add(1, arrival_s=9.0)
    queue.add(100, arrival_s=0.0)
    assert queue.order(10.0) == [1, 100]  # 1.0 against 0.1
    for _ in range(3):
        queue.ranked.clear()
        queue.order(10.0)
        assert sorted(queue.ranked) == [1, 100]


def test_only_the_stale_are_ranked_again() -> None:
    def update(state, events, view_of):
        state = dict(state or {})
        stale = set()
        for e in events:
            if e.kind == "progressed":
                state[e.data["index"]] = state.get(e.data["index"], 0) + 1
                stale.add(e.data["index"])
            if e.kind == "preempted":
                return state, None  # ALL
        return state, stale

    queue = Queue(
        policy(
            lambda state, view, now_s: (0, ((state or {}).get(view.index, 0),)),
            update=update,
        )
    )
    for index in range(5):
        queue.add(index)
    assert queue.order() == [0, 1, 2, 3, 4] and sorted(queue.ranked) == [0, 1, 2, 3, 4]
    queue.ranked.clear()
    assert queue.order() == [0, 1, 2, 3, 4] and queue.ranked == []
    queue.ranking.note(event(1))
    queue.ranking.note(event(99))  # of a request that has ended
    assert queue.order() == [0, 2, 3, 4, 1] and queue.ranked == [1]
    queue.ranking.note(event(0, "preempted"))
    queue.order()
    assert sorted(queue.ranked) == [0, 1, 1, 2, 3, 4]


def test_who_ended_is_in_no_order_and_never_ranked() -> None:
    queue = Queue(
        policy(
            lambda state, view, now_s: (0, (view.index,)),
            lambda state, view, now_s: now_s + 1,
        )
    )
    for index in range(4):
        queue.add(index)
    queue.order()
    queue.switch(2)
    queue.order()
    for index in (0, 2):
        queue.running.discard(index)
        queue.ranking.touch(queue.requests[index])
        queue.ranking.remove(queue.requests.pop(index))
    queue.add(9)
    queue.ranking.remove(queue.requests.pop(9))  # before it was ever ranked
    queue.ranked.clear()
    assert queue.order(100.0) == [1, 3] and queue.ranked == [1, 3]
    assert len(queue.ranking) == 2


def test_what_waits_for_a_time_does_not_pile_up() -> None:
    """Nothing leaks (docs/design.md, contract 3): a rank that is stale every plan and
    expires in an hour leaves one entry, and none once its request has ended."""
    queue = Queue(
        policy(
            lambda state, view, now_s: (0, (view.index,)),
            lambda state, view, now_s: now_s + 3600,
            lambda state, events, view_of: (state, None),
        )
    )
    requests = [queue.add(index) for index in range(3)]
    for plan in range(500):
        queue.ranking.note(event(0))
        queue.order(plan * 0.01)
    # Private, but nothing else shows it until the hour has passed.
    assert len(queue.ranking._expiry) <= 2 * len(requests)
    for request in requests:
        queue.ranking.remove(request)
        del queue.requests[request.index]
    queue.order(6.0)
    assert len(queue.ranking._expiry) <= len(requests)


@pytest.mark.parametrize("seed", range(5))
def test_any_history_is_ordered_as_a_sort_would(seed: int) -> None:
    """Ranks that depend on time, state and slot; compared with ranking everyone."""
    rng = random.Random(seed)

    def rank(state, view, now_s):
        served = state.get(view.index, 0)
        level = min(served // 3, 2)
        if now_s >= view.arrival_s + 5 * (1 + view.index % 3):
            level = 0  # aged
        return level, (served if view.running else view.priority, view.arrival_s)

    def until(state, view, now_s):
        at = view.arrival_s + 5 * (1 + view.index % 3)
        return at if now_s < at else None

    def update(state, events, view_of):
        state, stale = dict(state), set()
        for e in events:
            index = e.data["index"]
            if e.kind == "finished":
                state.pop(index, None)
            else:
                state[index] = state.get(index, 0) + 1
                stale.add(index)
        return state, stale

    base = policy(rank, until, update)._replace(init=lambda: {})
    queue = Queue(base)
    state: dict[int, int] = {}
    pending: list[Event] = []
    now_s = 0.0
    for index in range(300):
        now_s += rng.choice([0.0, 0.1, 1.0])
        if rng.random() < 0.6:
            queue.add(index, arrival_s=now_s, priority=rng.randrange(3))
        for _ in range(rng.randint(0, 4)):
            if not queue.requests:
                break
            one = rng.choice(sorted(queue.requests))
            action = rng.choice(["progress", "progress", "switch", "end"])
            if action == "progress":
                pending.append(event(one))
            elif action == "switch":
                queue.switch(one, preempted=one in queue.running)
            else:
                queue.running.discard(one)
                queue.ranking.remove(queue.requests.pop(one))
                pending.append(event(one, "finished"))
        for e in pending:
            queue.ranking.note(e)
        state, _ = update(state, pending, None)
        pending = []

        def key(i: int):
            view = queue.view(queue.requests[i])
            tie = 0 if view.running else 1 if view.preemptions else 2
            return (*rank(state, view, now_s), tie, i)  # noqa: B023

        assert queue.order(now_s) == sorted(queue.requests, key=key)
