"""The rules that every scheduling policy keeps, as one check.

Owns which runs are made and compared. Never says what a good order is.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.core import Event
from jaxserve.scheduling.policies import Policy, check_is_policy, fcfs
from jaxserve.testing.cases import SETTINGS, Asked, Case, random_requests, two_futures
from jaxserve.testing.frozen import leaves
from jaxserve.testing.schedule import check_schedule
from jaxserve.testing.serving import Run, serve
from jaxserve.testing.watch import Watch

MakePolicy = Callable[[Mapping[int, int]], Policy]

RULES = (
    "total order",
    "pure functions",
    "merged progress",
    "honest until",
    "honest stale set",
    "honest allow",
    "work conservation",
    "no ping-pong",
    "progress",
    "bounded wait",
    "conservation of blocks",
    "same tokens as FCFS",
    "deterministic replay",
    "same story when jumping",
    "no sight of the future",
    "no state left behind",
)
"""What a failure's message starts with; see `check_policy`."""


def check_policy(
    policy: Policy | MakePolicy,
    *,
    bounded_wait: int | None = None,
    sees_future: bool = False,
    seeds: Iterable[int] = (0,),
    requests: int = 20,
    statistics: int = 64,
) -> None:
    """Serve random workloads under a policy, in logical time, and check every rule.

    Shared prefixes, bursts, users, priorities, deadlines, tags and aborts; with tight
    and plenty of memory, 1 to 3 launches in flight, 1 and 4 steps a launch, each
    batching and prefill mode, with and without prefix caching. The rules:

    - total order: ranks are (number, tuple of numbers and strings), comparable, no NaN.
    - pure functions: a call made twice returns the same, and neither the state nor what
      the functions close over is written to.
    - merged progress: output tokens told in one event or in several lead to one order.
    - honest until, stale set, allow: at every plan each request has the rank that the
      scheduler knows. So a rank changes only when until said, when update named it, or
      when the quantum given by allow, at least 1, was spent.
    - work conservation: no slot idles while the first that waits fits.
    - no ping-pong: only a strictly smaller class displaces; of two requests none
      displaces the other in turn before either has got a token further; nobody is
      displaced more often than there are requests and tokens of its own output.
    - progress: 4 launches for each token of the workload, and 100, serve all of it.
    - bounded wait: where it is promised.
    - conservation of blocks: counts agree at each launch, and each row is of a request
      that holds its slot; idle, free + cached is all, and after `reset_prefix_cache`
      all is free.
    - same tokens as FCFS, whoever goes first.
    - deterministic replay: a second run has the same events. Same story when jumping:
      so has one in which the simulation skips planning.
    - no sight of the future: two truths, equal up to some token of each request, give
      the same plans until one of them shows more than that.
    - no state left behind: the state after four times as many requests is no larger.

    Args:
      policy: a policy; or a function that makes one from the true output lengths by
        submission index, as an oracle needs them.
      bounded_wait: after so many later arrivals of its class have passed a request,
        none may, save those that the same plan admits. None promises nothing.
      sees_future: exempts the policy from "no sight of the future".
      seeds: each is served in every setting.
      requests: of each workload.
      statistics: atoms that statistics (of users, lengths) may hold, however many
        requests were served.

    Raises:
      AssertionError: "rule: what was found"; what is one of RULES.
      ValueError: it is no policy.
    """

    def made(lengths: Mapping[int, int]) -> Policy:
        if isinstance(policy, Policy) or not callable(policy):
            check_is_policy("policy", policy)
            return policy
        needed = inspect.signature(policy).parameters.values()
        if not any(p.default is p.empty and p.kind != p.VAR_POSITIONAL for p in needed):
            raise ValueError(
                f"policy={policy!r} must be a Policy: call the function that makes it, "
                "or give one that takes the true output lengths"
            )
        found = policy(lengths)
        check_is_policy("policy(lengths)", found)
        return found

    for seed in seeds:
        for number, config in enumerate(SETTINGS):
            rng = random.Random(f"{seed}/{number}")
            case = Case(seed, config, random_requests(rng, requests))
            _check_case(case, made(case.lengths), bounded_wait)
            if not sees_future:
                _check_future(seed, config, rng, requests, made)
        _check_memory(seed, requests, statistics, made)


def _check_case(case: Case, policy: Policy, bounded_wait: int | None) -> None:
    watch = Watch(policy, case)
    watched = serve(policy, case, watch=watch)
    check_schedule(case, watched, bounded_wait)
    plain, again = serve(policy, case), serve(policy, case)
    _check_equal(case, "deterministic replay", _events(plain), _events(again))
    _check_equal(case, "pure functions", _events(watched), _events(plain))
    watch.check_outside()
    _check_tokens(case, plain, serve(fcfs(), case))
    if case.config.launches_in_flight == 1 and not case.config.enable_prefix_caching:
        whole = case.without_aborts()  # they are timed by the engine's steps
        planned = serve(policy, whole)
        jumped = serve(policy, whole, jump=True)
        stories = (_story(_events(run)) for run in (planned, jumped))
        _check_equal(case, "same story when jumping", *stories)


def _events(run: Run) -> list[tuple]:
    """What happened and when, without the host's own time."""
    return [
        (event.time_s, event.kind, event.request_id or "", _without_host(event))
        for _, event in run.events
    ]


def _without_host(event: Event) -> dict[str, Any]:
    return {**event.data, "host_s": 0.0}


def _story(events: list[tuple]) -> list[tuple]:
    """Events by time, and each launch's rows in order of slots."""
    told = [
        (*head, {**data, "slots": sorted(data.get("slots", []))})
        for *head, data in events
    ]
    return sorted(told, key=lambda event: event[:3])


def _check_equal(case: Case, rule: str, one: list, two: list) -> None:
    for i, (a, b) in enumerate(zip(one, two, strict=False)):
        if a != b:
            case.fail(rule, f"event {i} is {a} in one run and {b} in the other")
    if len(one) != len(two):
        case.fail(rule, f"one run has {len(one)} events, the other {len(two)}")


def _check_tokens(case: Case, run: Run, reference: Run) -> None:
    for index in range(len(case.requests)):
        (mine, why), (theirs, reason) = run.outputs[index], reference.outputs[index]
        shown = min(len(mine), len(theirs)) if "abort" in (why, reason) else None
        if mine[:shown] != theirs[:shown] or (shown is None and why != reason):
            case.fail(
                "same tokens as FCFS",
                f"request {index} gives {mine}, {why!r}; under fcfs {theirs}, "
                f"{reason!r}",
            )


def _check_future(
    seed: int,
    config: EngineConfig,
    rng: random.Random,
    requests: int,
    made: Callable[[Mapping[int, int]], Policy],
) -> None:
    known = rng.randint(2, 8)
    futures = two_futures(rng, requests, known)
    cases = [Case(seed, config, future) for future in futures]
    runs = [serve(made(case.lengths), case) for case in cases]
    same = min(
        next(at.launches for at in run.revealed if at.tokens > known) for run in runs
    )
    one, two = (run.plans[:same] for run in runs)
    for number, (a, b) in enumerate(zip(one, two, strict=True)):
        if a.who != b.who or not all(map(np.array_equal, a.plan, b.plan)):
            lengths = [list(case.lengths.values()) for case in cases]
            cases[0].fail(
                "no sight of the future",
                f"launch {number} serves {list(a.who)} or {list(b.who)}, while no "
                f"request has shown more than the {known} tokens that are the same in "
                f"both truths, of lengths {lengths[0]} and {lengths[1]}",
            )


def _check_memory(
    seed: int,
    requests: int,
    statistics: int,
    made: Callable[[Mapping[int, int]], Policy],
) -> None:
    config = SETTINGS[0]
    sizes = {}
    for count in (0, requests, 4 * requests):
        rng = random.Random(f"memory/{seed}")
        asked = random_requests(rng, count, longest_output=6)
        last_s = max((a.arrival_s for a in asked), default=0.0)
        asked.append(_late(last_s + 1e3))
        case = Case(seed, config, asked)
        policy = made(case.lengths)
        states: list[Any] = []
        update = policy.update

        def kept(state, events, view_of, update=update, states=states):
            new, stale = update(state, events, view_of)
            states[:] = [new]
            return new, stale

        serve(policy._replace(update=kept), case)
        sizes[count] = leaves(states[0])
    none, few, many = sizes.values()
    if many > few and many - none > statistics:
        case.fail(
            "no state left behind",
            f"the state holds {none} atoms beside one live request, {few} after "
            f"{requests} others and {many} after {4 * requests}; statistics may hold "
            f"{statistics}",
        )


def _late(arrival_s: float) -> Asked:
    """A request that comes when all others are gone, so that their ends are told."""
    return Asked([1, 2, 3], [4], 1, arrival_s, 0, None, None, {}, None, None, None)
