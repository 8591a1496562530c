"""The conformance suite has teeth, and every policy that is shipped passes it."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from jaxserve import engine as engine_module
from jaxserve.executors.sim_executor import SimExecutor
from jaxserve.scheduling import planner as planner_module
from jaxserve.scheduling.policies import (
    POLICIES,
    Policy,
    bounded_wait,
    chain,
    edf,
    fair_share,
    fcfs,
    hrrn,
    mlfq,
    prefix_affinity,
    prefix_sjf,
    priority,
    sjf,
    srpt,
)
from jaxserve.scheduling.predictors import history, oracle, prompt_signals
from jaxserve.testing import RULES, check_policy
from jaxserve.testing.frozen import frozen, leaves

# Every policy that is shipped ---------------------------------------------------------

SHIPPED: dict[str, tuple] = {
    "fcfs": (fcfs(), {"bounded_wait": 0}),
    "hrrn": (hrrn(), {}),
    "hrrn of history": (hrrn(history(window=5)), {}),
    "priority": (priority(), {"bounded_wait": 0}),
    "priority aging": (priority(aging_s=0.1), {}),
    "edf": (edf(), {}),
    "edf displacing": (edf(preempt=True), {}),
    "mlfq": (mlfq(), {}),
    "mlfq boosted": (mlfq(quanta=(2, 4), boost_interval_s=0.2), {}),
    "mlfq skip join": (mlfq(quanta=(2, 4, 8), skip_join=True), {}),
    "fair_share": (fair_share(), {}),
    "fair_share weights": (fair_share({"ann": 2.0, "ben": 0.5}, 1.0, 0.0), {}),
    "prefix_affinity": (prefix_affinity(), {"bounded_wait": 100}),
    "prefix_affinity 3": (prefix_affinity(3), {"bounded_wait": 3}),
    "prefix_sjf": (prefix_sjf(), {"bounded_wait": 100}),
    "prefix_sjf 2": (prefix_sjf(2), {"bounded_wait": 2}),
    "sjf history": (sjf(history(window=5)), {}),
    "sjf signals": (sjf(prompt_signals()), {}),
    "sjf oracle": (lambda truth: sjf(oracle(truth)), {"sees_future": True}),
    "sjf 1": (
        lambda truth: sjf(oracle(truth, noise=1.0), skip_limit=1),
        {"sees_future": True, "bounded_wait": 1},
    ),
    "srpt history": (srpt(history("kind", window=5)), {}),
    "srpt signals": (srpt(prompt_signals()), {}),
    "srpt oracle": (lambda truth: srpt(oracle(truth)), {"sees_future": True}),
    "srpt eager": (
        lambda truth: srpt(oracle(truth), preempt_until=1.0),
        {"sees_future": True},
    ),
    "chain": (chain(priority(), sjf(history(window=5))), {}),
    "chain of mlfq": (chain(mlfq(quanta=(3,)), hrrn()), {}),
    "bounded_wait": (bounded_wait(hrrn(), 2), {"bounded_wait": 2}),
    "bounded_wait 0": (bounded_wait(edf(), 0), {"bounded_wait": 0}),
}


def test_every_policy_by_name_is_among_them() -> None:
    assert {name.split()[0] for name in SHIPPED} == set(POLICIES)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_policy_conforms(name: str) -> None:
    policy, promises = SHIPPED[name]
    check_policy(policy, **promises)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_policy_conforms_everywhere(name: str) -> None:
    policy, promises = SHIPPED[name]
    check_policy(policy, **promises, seeds=range(100, 106), requests=30)


# A broken policy for each rule --------------------------------------------------------


def ranked(rank, **more) -> Policy:
    """FCFS with another rank."""
    return fcfs()._replace(rank=rank, **more)


def place(view) -> tuple:
    return view.arrival_s, view.index


def naming_all(update):
    """An update from one over states alone; every rank may have changed."""
    return lambda state, events, view_of: (update(state, events), None)


def not_a_number() -> Policy:
    return ranked(
        lambda state, view, now_s: (
            (0, (float("nan"), *place(view)))
            if view.index == 7
            else (0, (0, *place(view)))
        )
    )


def of_two_types() -> Policy:
    return ranked(lambda state, view, now_s: (0, (view.user or 0, *place(view))))


def no_tuple() -> Policy:
    return ranked(lambda state, view, now_s: view.arrival_s)


def counts_its_calls() -> Policy:
    calls = itertools.count()
    return ranked(lambda state, view, now_s: (0, (next(calls),)))


def writes_into_its_state() -> Policy:
    def update(state, events, view_of):
        state.extend(e.data["index"] for e in events if e.kind == "finished")
        return state, ()

    return fcfs()._replace(init=list, update=update)


def rank_writes_into_its_state() -> Policy:
    def rank(state, view, now_s):
        state[view.index] = now_s
        return 0, place(view)

    return ranked(rank, init=dict)


def keeps_notes_outside() -> Policy:
    seen = set()

    def rank(state, view, now_s):
        seen.add(view.index)
        return 0, place(view)

    return ranked(rank)


def counts_events() -> Policy:
    """Whom it was told of an even number of times goes first."""

    def update(state, events):
        state = dict(state)
        for event in events:
            index = event.data["index"]
            state[index] = state.get(index, 0) + (event.kind == "progressed")
            if event.kind == "finished":
                del state[index]
        return state

    return ranked(
        lambda state, view, now_s: (0, (state.get(view.index, 0) % 2, *place(view))),
        init=dict,
        update=naming_all(update),
    )


def turns_with_time() -> Policy:
    """The order turns around every 0.1 s, and until says nothing of it."""
    return ranked(
        lambda state, view, now_s: (0, ((-1) ** int(now_s / 0.1) * view.index,))
    )


def until_too_late() -> Policy:
    return turns_with_time()._replace(
        until=lambda state, view, now_s: (int(now_s / 0.1) + 2) * 0.1
    )


def follows_tokens_untold() -> Policy:
    return ranked(lambda state, view, now_s: (0, (view.output_tokens, *place(view))))


def follows_its_state_untold() -> Policy:
    """Turns the order at every tenth end, and update names nobody."""

    def update(state, events, view_of):
        return state + sum(e.kind == "finished" for e in events), ()

    return ranked(
        lambda state, view, now_s: (0, ((-1) ** (state // 3) * view.index,)),
        init=int,
        update=update,
    )


def overshoots() -> Policy:
    """Drops a level after 3 tokens, but allows 5."""
    return ranked(
        lambda state, view, now_s: (view.output_tokens >= 3, place(view)),
        allow=lambda state, view: max(5 - view.output_tokens, 1),
    )


def allows_nothing() -> Policy:
    return fcfs()._replace(allow=lambda state, view: 0)


def flips_classes() -> Policy:
    """Odd and even requests take turns of 25 ms at being urgent."""

    def rank(state, view, now_s):
        return (view.index + int(now_s / 0.025)) % 2, place(view)

    return ranked(rank, until=lambda state, view, now_s: now_s)


def whoever_waits_is_urgent() -> Policy:
    return ranked(lambda state, view, now_s: (view.running, place(view)))


def last_come() -> Policy:
    """Last come, first served: starves whoever came early."""
    return ranked(lambda state, view, now_s: (0, (-view.arrival_s, -view.index)))


def other_in_later_runs() -> Policy:
    """Turns around from the fourth run on; a run calls init once, a watch twice."""
    runs = []

    def init():
        runs.append(0)
        return len(runs) > 3

    return ranked(
        lambda state, view, now_s: (0, (-view.index if state else view.index,)),
        init=init,
    )


def counts_updates() -> Policy:
    """Its order turns with every seventh update, told, but a jump makes fewer."""
    return ranked(
        lambda state, view, now_s: (0, ((-1) ** (state // 7) * view.index,)),
        init=int,
        update=naming_all(lambda state, events: state + 1),
    )


def forgets_nobody() -> Policy:
    def update(state, events, view_of):
        arrived = (e.data["index"] for e in events if e.kind == "arrived")
        return (*state, *arrived), ()

    return fcfs()._replace(init=tuple, update=update)


BROKEN = [
    (not_a_number, "total order"),
    (of_two_types, "total order"),
    (no_tuple, "total order"),
    (counts_its_calls, "pure functions"),
    (writes_into_its_state, "pure functions"),
    (rank_writes_into_its_state, "pure functions"),
    (keeps_notes_outside, "pure functions"),
    (counts_events, "merged progress"),
    (turns_with_time, "honest until"),
    (until_too_late, "honest until"),
    (follows_tokens_untold, "honest stale set"),
    (follows_its_state_untold, "honest stale set"),
    (overshoots, "honest allow"),
    (allows_nothing, "honest allow"),
    (flips_classes, "no ping-pong"),
    (whoever_waits_is_urgent, "progress"),
    (other_in_later_runs, "deterministic replay"),
    (counts_updates, "same story when jumping"),
    (forgets_nobody, "no state left behind"),
]


@pytest.mark.parametrize(("broken", "rule"), BROKEN)
def test_a_broken_policy_is_told_which_rule_it_breaks(broken, rule: str) -> None:
    assert rule in RULES
    with pytest.raises(AssertionError, match=f"^{rule}: "):
        check_policy(broken())


@pytest.mark.parametrize(
    ("policy", "promised"),
    [(last_come(), 2), (bounded_wait(last_come(), 8), 2)],
)
def test_a_broken_promise_of_a_bounded_wait_is_found(policy, promised: int) -> None:
    check_policy(policy)
    with pytest.raises(AssertionError, match="^bounded wait: request"):
        check_policy(policy, bounded_wait=promised)


@pytest.mark.parametrize("shortest", [sjf, srpt])
def test_a_policy_that_sees_the_future_is_found(shortest) -> None:
    with pytest.raises(AssertionError, match="^no sight of the future: launch"):
        check_policy(lambda truth: shortest(oracle(truth)))


def test_a_failure_names_the_seed_and_the_setting() -> None:
    with pytest.raises(AssertionError, match=r"seed=4.*'num_blocks': 12"):
        check_policy(not_a_number(), seeds=[4])


# Faults of the engine that no policy can make are found as well -----------------------


def test_a_scheduler_that_idles_is_found(monkeypatch) -> None:
    admit = planner_module.Planner.admit

    def idle(self, request):
        return None if self._residents.running else admit(self, request)

    monkeypatch.setattr(planner_module.Planner, "admit", idle)
    with pytest.raises(AssertionError, match="^work conservation: request"):
        check_policy(fcfs())


def test_a_scheduler_that_lets_equals_displace_is_found(monkeypatch) -> None:
    room_for = planner_module.Planner._room_for

    def unjust(self, request, hits):
        key, plan = self._ranking.key, self._residents._plan
        running = self._residents.running.values()
        behind = [r for r in running if key(r.request) > key(request)]
        found = room_for(self, request, hits)
        plenty = self._config.num_blocks == 80
        if found is None and plenty and behind and behind[0].placed < plan:
            return behind[:1]
        return found

    monkeypatch.setattr(planner_module.Planner, "_room_for", unjust)
    with pytest.raises(AssertionError, match="^no ping-pong: .* may displace"):
        check_policy(last_come())


def test_a_miscount_of_blocks_is_found(monkeypatch) -> None:
    result = SimExecutor.result

    def one_more(self, ticket):
        output = result(self, ticket)
        return output._replace(num_free=output.num_free + 1)

    monkeypatch.setattr(SimExecutor, "result", one_more)
    with pytest.raises(AssertionError, match="^conservation of blocks: "):
        check_policy(fcfs())


def test_a_row_whose_request_lost_its_slot_is_found(monkeypatch) -> None:
    place = planner_module.Planner.place

    def lose(self, running):
        row = place(self, running)
        if row and row.prompt_tokens == 0 and len(running.request.output) == 3:
            self._preempt(running)
        return row

    monkeypatch.setattr(planner_module.Planner, "place", lose)
    with pytest.raises(AssertionError, match="^conservation of blocks: a launch"):
        check_policy(fcfs())


def test_a_cache_that_is_not_forgotten_is_found(monkeypatch) -> None:
    monkeypatch.setattr(engine_module.Engine, "reset_prefix_cache", lambda self: None)
    with pytest.raises(AssertionError, match="^conservation of blocks: after reset"):
        check_policy(fcfs())


def test_tokens_that_depend_on_the_schedule_are_found(monkeypatch) -> None:
    submit = SimExecutor.submit

    def mixed(self, plan, who, moves):
        ticket = submit(self, plan, who, moves)
        tokens = ticket.output.tokens + np.int32(sum(who))
        return ticket._replace(output=ticket.output._replace(tokens=tokens))

    monkeypatch.setattr(SimExecutor, "submit", mixed)
    with pytest.raises(AssertionError, match="^same tokens as FCFS: request"):
        check_policy(last_come())


def test_every_rule_has_a_broken_example() -> None:
    rest = {
        "work conservation",
        "bounded wait",
        "conservation of blocks",
        "same tokens as FCFS",
        "no sight of the future",
    }
    assert {rule for _, rule in BROKEN} | rest == set(RULES)


# What the suite stands on -------------------------------------------------------------


@dataclasses.dataclass
class Box:
    content: list


def test_frozen_values_are_equal_exactly_if_their_contents_are() -> None:
    box = Box([1, {"a": np.arange(3)}])
    before = frozen(box)
    assert before == frozen(Box([1, {"a": np.arange(3)}]))
    box.content[1]["a"][2] = 7
    assert frozen(box) != before
    assert frozen(float("nan")) == frozen(float("nan"))
    box.content.append(box)  # a loop ends
    assert frozen(box) == frozen(box)


def test_frozen_functions_show_what_they_close_over() -> None:
    notes = []
    function = lambda: notes  # noqa: E731
    before = frozen(function)
    assert frozen(function) == before
    notes.append(1)
    assert frozen(function) != before


def test_leaves_count_atoms() -> None:
    assert leaves((1, (2, 3), "four", None)) == 5
    assert leaves({"key": [1, 2]}) == 3
    assert leaves(()) == 0
    many, few = (leaves(np.zeros((n, n))) for n in (10, 5))
    assert many - few == 100 - 25
