"""Policies made of policies: one after the other, and one with a bounded wait.

Owns what the orders of several policies become together. Never sees why a policy
ranks as it does.
"""

from __future__ import annotations

import bisect
import math
import numbers
from collections.abc import Collection, Sequence
from typing import NamedTuple

from jaxserve.core import Event
from jaxserve.scheduling.policies.base import (
    Order,
    Policy,
    State,
    View,
    ViewOf,
    check_is_policy,
    never,
    unlimited,
    unmoved,
)

Place = tuple[float, int]  # (arrival_s, index): where FCFS has a request


def chain(*policies: Policy) -> Policy:
    """Lexicographic: the first policy decides, each later one where all before it tie.

    Only the first one's class displaces; the classes of the others refine the order. A
    policy that ends its order with (arrival_s, index), as those of this package do, has
    said all it has to say before that: it is cut off all but the last, or nobody would
    ever tie. So `chain(priority(), sjf(...))` serves the shortest of the most urgent,
    and `chain(fcfs(), p)` is `p`. Bound the wait of a chain as a whole, with
    `bounded_wait(chain(...), n)`: within it, the next policy would order those passed.

    Raises:
      ValueError: there are no policies, or one is none.
    """
    if not policies:
        raise ValueError("chain() must be given one policy at least")
    for i, policy in enumerate(policies):
        check_is_policy(f"policies[{i}]", policy)

    def rank(state: tuple[State, ...], view: View, now_s: float) -> tuple[float, Order]:
        ranks = [p.rank(s, view, now_s) for p, s in zip(policies, state, strict=True)]
        order: list[float | int | str] = []
        for klass, own in ranks[:-1]:
            if own[-2:] == (view.arrival_s, view.index):
                own = own[:-2]
            order += (klass, *own)
        order += (ranks[-1][0], *ranks[-1][1])
        return ranks[0][0], tuple(order[1:])

    def update(
        state: tuple[State, ...], events: Sequence[Event], view_of: ViewOf
    ) -> tuple[tuple[State, ...], Collection[int] | None]:
        new, stale = zip(
            *(
                p.update(s, events, view_of)
                for p, s in zip(policies, state, strict=True)
            ),
            strict=True,
        )
        return new, None if None in stale else set().union(*stale)

    def until(state: tuple[State, ...], view: View, now_s: float) -> float | None:
        times = (p.until(s, view, now_s) for p, s in zip(policies, state, strict=True))
        return min((at for at in times if at is not None), default=None)

    def allow(state: tuple[State, ...], view: View) -> int | None:
        quanta = (p.allow(s, view) for p, s in zip(policies, state, strict=True))
        return min((q for q in quanta if q is not None), default=None)

    return Policy(
        init=lambda: tuple(p.init() for p in policies),
        rank=rank,
        update=unmoved if all(p.update is unmoved for p in policies) else update,
        until=never if all(p.until is never for p in policies) else until,
        allow=unlimited if all(p.allow is unlimited for p in policies) else allow,
    )


class _Passed(NamedTuple):
    """What bounds the wait.

    Attributes:
      inner: the bounded policy's state.
      latest: the skip_limit latest places among the requests admitted since the engine
        was last idle, ascending.
      fresh: places of the live requests that were passed less than skip_limit times,
        ascending.
      live: how many requests are live.
    """

    inner: State
    latest: tuple[Place, ...] = ()
    fresh: tuple[Place, ...] = ()
    live: int = 0


def bounded_wait(policy: Policy, skip_limit: int) -> Policy:
    """The policy, but whoever skip_limit later arrivals have passed goes first.

    Those come first within their class, in order of arrival; a request of a strictly
    smaller class still passes, and so does what `EngineConfig.skip_limit` lets pass one
    that waits for memory. Admissions count when the next plan is made, so one plan
    that admits several may exceed the limit by all but one of them: a request is passed
    by at most skip_limit + max_num_seqs - 1 later arrivals of its class, and by
    skip_limit if a plan admits one at most. 0 is FCFS within each class.

    While a request waits for its first admission, those admitted that arrived later
    have passed it. So it has been passed skip_limit times exactly if it arrived before
    the skip_limit-th latest of all admitted: one threshold, which only rises, tells.

    Raises:
      ValueError: skip_limit is not an integer >= 0.
    """
    check_is_policy("policy", policy)
    whole = isinstance(skip_limit, numbers.Integral)
    if not whole or isinstance(skip_limit, bool) or skip_limit < 0:
        raise ValueError(
            f"skip_limit={skip_limit!r} must be an integer >= 0; 0 is FCFS"
        )

    def threshold(latest: Sequence[Place]) -> Place:
        if len(latest) < skip_limit:
            return (-math.inf, 0)
        return latest[0] if latest else (math.inf, 0)

    def rank(state: _Passed, view: View, now_s: float) -> tuple[float, Order]:
        klass, order = policy.rank(state.inner, view, now_s)
        place = (view.arrival_s, view.index)
        if place < threshold(state.latest):
            return klass, (0, *place)
        return klass, (1, *order)

    def update(
        state: _Passed, events: Sequence[Event], view_of: ViewOf
    ) -> tuple[_Passed, Collection[int] | None]:
        inner, stale = policy.update(state.inner, events, view_of)
        latest, fresh, live = list(state.latest), list(state.fresh), state.live
        for event in events:
            if event.kind not in ("arrived", "admitted", "finished"):
                continue
            index = event.data["index"]
            place = (view_of(index).arrival_s, index)
            if event.kind == "arrived":
                live += 1
                bisect.insort(fresh, place)
            elif event.kind == "finished":
                live -= 1
                at = bisect.bisect_left(fresh, place)
                if fresh[at : at + 1] == [place]:
                    del fresh[at]
            elif event.data["first"]:
                bisect.insort(latest, place)
        latest = latest[max(0, len(latest) - skip_limit) :]
        cut = bisect.bisect_left(fresh, threshold(latest))
        passed, fresh = fresh[:cut], fresh[cut:]
        if not live:
            latest = []
        state = _Passed(inner, tuple(latest), tuple(fresh), live)
        return state, None if stale is None else {*stale, *(i for _, i in passed)}

    def until(state: _Passed, view: View, now_s: float) -> float | None:
        return policy.until(state.inner, view, now_s)

    def allow(state: _Passed, view: View) -> int | None:
        return policy.allow(state.inner, view)

    return Policy(
        init=lambda: _Passed(policy.init()),
        rank=rank,
        update=update,
        until=never if policy.until is never else until,
        allow=unlimited if policy.allow is unlimited else allow,
    )
