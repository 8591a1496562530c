"""Looks at every call that the scheduler makes of a policy.

Owns the rules of the policy's functions: total order, purity, and that what they say of
when a rank may change is honest. Never sees a plan.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from jaxserve.core import Event
from jaxserve.scheduling.policies import Policy, View, ViewOf
from jaxserve.testing.cases import Case
from jaxserve.testing.frozen import frozen

Rank = tuple[float, tuple]


class _Known(NamedTuple):
    """A rank as the scheduler knows it, and what it was computed from."""

    rank: Rank
    state: Any
    view: View
    now_s: float


class Watch:
    """A policy that is looked at; `policy` behaves as it does.

    Args:
      policy: under examination.
      case: names the failures.
    """

    clock: Callable[[], float]

    def __init__(self, policy: Policy, case: Case):
        self._inner = policy
        self._case = case
        self._known: dict[int, _Known] = {}
        self._views: dict[int, View] = {}
        self._admitted: set[int] = set()  # and not preempted since
        self._after: Any = None  # content of the state that the last update returned
        self._fresh = False  # whether an update came since the last `settle`
        self._outside = frozen(tuple(policy))
        self.state: Any = None
        self.policy = Policy(
            self._init, self._rank, self._update, self._until, self._allow
        )

    def _pure(self, name: str, one: Any, two: Any) -> None:
        if frozen(one) != frozen(two):
            self._case.fail(
                "pure functions", f"{name} called twice returns {one!r}, then {two!r}"
            )

    def check_outside(self) -> None:
        """What the functions close over is as it was at the start."""
        if frozen(tuple(self._inner)) != self._outside:
            self._case.fail(
                "pure functions",
                "what the policy's functions close over has changed during the run; "
                "keep all that changes in the state",
            )

    # The policy's functions -----------------------------------------------------------

    def _init(self) -> Any:
        self.state = self._inner.init()
        self._pure("init()", self.state, self._inner.init())
        self._after = frozen(self.state)
        return self.state

    def _rank(self, state: Any, view: View, now_s: float) -> Rank:
        rank = self._inner.rank(state, view, now_s)
        call = f"rank of request {view.index} at {now_s} s"
        self._pure(call, rank, self._inner.rank(state, view, now_s))
        self._check_form(call, rank)
        for index, other in self._known.items():
            try:
                assert (rank < other.rank) + (other.rank < rank) <= 1
            except TypeError as error:
                what = f"{rank!r} of request {view.index} and {other.rank!r} of {index}"
                self._case.fail("total order", f"{what} cannot be compared", error)
        self._known[view.index] = _Known(rank, state, view, now_s)
        return rank

    def _check_form(self, call: str, rank: Any) -> None:
        if not (isinstance(rank, tuple) and len(rank) == 2):
            self._case.fail("total order", f"{call} is {rank!r}, not (class, order)")
        klass, order = rank
        parts = (klass, *order) if isinstance(order, tuple) else (klass, order)
        if not isinstance(order, tuple) or not isinstance(klass, numbers.Real):
            self._case.fail(
                "total order", f"{call} is {rank!r}: class a number, order a tuple"
            )
        for part in parts:
            number = isinstance(part, numbers.Real)
            if not (number or isinstance(part, str)) or (number and math.isnan(part)):
                self._case.fail(
                    "total order",
                    f"{call} is {rank!r}; {part!r} is neither a number nor a string",
                )

    def _update(
        self, state: Any, events: Sequence[Event], view_of: ViewOf
    ) -> tuple[Any, Collection[int] | None]:
        if frozen(state) != self._after:
            self._case.fail(
                "pure functions", "rank, until or allow has written into the state"
            )
        result = self._inner.update(state, events, view_of)
        self._pure("update", result, self._inner.update(state, events, view_of))
        if frozen(state) != self._after:
            self._case.fail("pure functions", "update has written into its old state")
        new, stale = result
        live = set(self._views)
        for event in events:
            index = event.data["index"]
            if event.kind == "arrived":
                live.add(index)
            elif event.kind == "admitted":
                self._admitted.add(index)
            elif event.kind == "preempted":
                self._admitted.discard(index)
            elif event.kind == "finished":
                live.discard(index)
                self._known.pop(index, None)
                self._admitted.discard(index)
        self._views = {index: view_of(index) for index in sorted(live)}
        self._check_split(state, events, view_of, new)
        self._fresh = True
        self.state, self._after = new, frozen(new)
        return new, stale

    def _check_split(
        self, state: Any, events: Sequence[Event], view_of: ViewOf, new: Any
    ) -> None:
        """Progress told token by token leads to the same order as told at once."""
        parts = [part for event in events for part in _split(event)]
        if len(parts) == len(events):
            return
        other, _ = self._inner.update(state, parts, view_of)
        orders = [self._order(s) for s in (new, other)]
        if orders[0] != orders[1]:
            self._case.fail(
                "merged progress",
                f"{[e for e in events if e.kind == 'progressed']} lead to the order "
                f"{orders[0]}, the same tokens told one by one to {orders[1]}",
            )

    def _order(self, state: Any) -> list[int]:
        """The live requests, first to last, as of now."""
        now_s = self.clock()
        ranks = {i: self._inner.rank(state, v, now_s) for i, v in self._views.items()}
        try:
            return sorted(ranks, key=lambda i: (ranks[i], i))
        except TypeError as error:
            self._case.fail("total order", f"{ranks} cannot be compared", error)

    def _until(self, state: Any, view: View, now_s: float) -> float | None:
        until_s = self._inner.until(state, view, now_s)
        call = f"until of request {view.index} at {now_s} s"
        self._pure(call, until_s, self._inner.until(state, view, now_s))
        if until_s is None:
            samples = [now_s + wait_s for wait_s in (0.01, 0.5, 20.0, 1e4)]
        elif not isinstance(until_s, numbers.Real) or math.isnan(until_s):
            self._case.fail("honest until", f"{call} is {until_s!r}, not a time")
        else:
            span_s = min(until_s, now_s + 1e4) - now_s
            samples = [now_s + span_s * part for part in (0.01, 0.5, 0.99)]
            samples = [*samples, math.nextafter(until_s, -math.inf)]
            samples = [time_s for time_s in samples if now_s < time_s < until_s]
        before = self._inner.rank(state, view, now_s)
        for time_s in samples:
            later = self._inner.rank(state, view, time_s)
            if later != before:
                self._case.fail(
                    "honest until",
                    f"{call} is {until_s}, but its rank {before!r} is {later!r} at "
                    f"{time_s} s",
                )
        return until_s

    def _allow(self, state: Any, view: View) -> int | None:
        tokens = self._inner.allow(state, view)
        call = f"allow of request {view.index} with {view.output_tokens} output tokens"
        self._pure(call, tokens, self._inner.allow(state, view))
        if tokens is not None and not (
            isinstance(tokens, numbers.Integral) and tokens >= 1
        ):
            self._case.fail(
                "honest allow", f"{call} is {tokens!r}; it must be >= 1, or None"
            )
        return tokens

    # The scheduler's knowledge --------------------------------------------------------

    def settle(self) -> tuple[Mapping[int, Rank], Mapping[int, View]]:
        """A plan was made: the ranks that it went by were right.

        Returns the rank of every live request, and their views before the plan, which
        are known only if anything happened since the plan before.
        """
        ranks = {index: known.rank for index, known in self._known.items()}
        if not self._fresh:
            return ranks, {}
        self._fresh = False
        now_s = self.clock()
        for index, view in self._views.items():
            known = self._known[index]
            if index in self._admitted and not view.running:
                continue  # it gave its slot back and will end: nobody's rival
            rank = self._inner.rank(self.state, view, now_s)
            if rank != known.rank:
                self._blame(known, view, now_s, rank)
        return ranks, dict(self._views)

    def _blame(self, known: _Known, view: View, now_s: float, rank: Rank) -> None:
        """Fail by the rule that let the scheduler go by an old rank."""
        then = f"the scheduler was told {known.rank!r} at {known.now_s} s"
        what = f"request {view.index} has rank {rank!r} at {now_s} s, but {then}"
        if self._inner.rank(self.state, view, known.now_s) == known.rank:
            self._case.fail("honest until", f"{what} and no until has come due")
        if self._inner.rank(known.state, view, now_s) == known.rank:
            self._case.fail(
                "honest stale set", f"{what}; the update that changed it names it not"
            )
        old, new = known.view._asdict(), view._asdict()
        moved = {k: (old[k], new[k]) for k in old if old[k] != new[k]}
        quantum = self._inner.allow(known.state, known.view)
        if quantum is not None and set(moved) == {"output_tokens"}:
            self._case.fail(
                "honest allow", f"{what}; its quantum of {quantum} was not spent"
            )
        self._case.fail(
            "honest stale set", f"{what}; its view has changed by {moved}, untold"
        )


def _split(event: Event) -> list[Event]:
    """An event of several output tokens as two events, the first of one token."""
    tokens = event.data["output_tokens"] if event.kind == "progressed" else 0
    if tokens < 2:
        return [event]
    first = {**event.data, "output_tokens": 1}
    rest = {**event.data, "prompt_tokens": 0, "output_tokens": tokens - 1}
    return [event._replace(data=first), event._replace(data=rest)]
