"""Fair sharing between users: a virtual token counter for each.

Owns what service costs and how users compare. Never sees what a request will put out.
"""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from jaxserve.core import Event
from jaxserve.scheduling.policies.base import (
    Order,
    Policy,
    View,
    ViewOf,
    never,
    unlimited,
)

User = str | None

MAX_IDLE_USERS = 1000
"""Users without a request whose service is remembered, as long as others have some."""

UNIT = 2**40
"""Service is counted in whole 1 / UNIT, so that it adds up to the same however it is
told: floats would let the order of two equals depend on how their tokens were split."""


class _Account(NamedTuple):
    """One user's; all numbers are service over the user's weight, in 1 / UNIT.

    Attributes:
      counter: service received, and lifts.
      shown: the counter as ranks see it: as of the last event that could let a waiting
        request in.
      waiting: prompt cost of each waiting request, in order of arrival; 0 of those that
        lost their slot, whose prompt has been charged.
      ahead: cost of the waiting requests before each.
      live: requests that have not ended.
    """

    counter: int
    shown: int
    waiting: Mapping[int, int]
    ahead: Mapping[int, int]
    live: int


_NEW = _Account(0, 0, {}, {}, 0)


class _Books(NamedTuple):
    """What is known of every user.

    Attributes:
      accounts: by user; those of idle users are forgotten in time.
      user_of: of each live request, by submission index.
      floor: what a returning user's counter is lifted to, at least; never falls.
      last: the user whose waiting requests were the last to run out.
    """

    accounts: Mapping[User, _Account]
    user_of: Mapping[int, User]
    floor: int
    last: User


_NOBODY = _Books({}, {}, 0, None)


def fair_share(
    weights: Mapping[str, float] | None = None,
    input_weight: float = 1.0,
    output_weight: float = 2.0,
) -> Policy:
    """The user served least goes first: Virtual Token Counter.

    Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024. A user's
    counter grows by input_weight for each prompt token when a request is admitted for
    the first time, and by output_weight for each output token that was read, both over
    the user's weight; recomputation is free. When a user with nothing waiting sends
    again, its counter is lifted to the smallest of those who wait, or else to that of
    the user who waited last, so that idle time saves up no credit. When the engine has
    run empty all start again as equals: nobody had to wait for what was served before.
    Within a user, first come first served. Never displaces; whoever runs goes on before
    newcomers.

    Guarantee: the service of two users of equal weight who both always wait differs by
    2 * max(input_weight * L, output_weight * M) at most, L the longest prompt and M the
    most tokens a running batch holds. It knows no lengths, so it shortens no mean.

    A waiting request's key adds the prompts of its user that wait before it, which
    makes one plan that admits several choose as if it charged each at once. Counters
    move with every token, but ranks follow only when somebody arrived, was admitted,
    lost a slot, ended, or computed a part of its prompt. Else, decodes alone running,
    nobody can be let in, and nothing is ranked. A plan that does follow ranks every
    waiting request of a served user again.

    Args:
      weights: share of each user, 1 where none is given. Requests without a user are
        one user, of weight 1.
      input_weight, output_weight: cost of a token.

    Raises:
      ValueError: an argument breaks its rule.
    """
    if weights is not None and not isinstance(weights, Mapping):
        raise ValueError(
            f"weights={weights!r} must map users to numbers, or be None for equal ones"
        )
    weights = dict(weights or {})
    for user, weight in weights.items():
        known = isinstance(user, str) and isinstance(weight, numbers.Real)
        if not known or isinstance(weight, bool) or not 1e-6 <= weight <= 1e6:
            raise ValueError(
                f"weights[{user!r}]={weight!r} must be of a user's name, and a number "
                "in [1e-6, 1e6]; twice the weight is twice the share"
            )
    costs = {"input_weight": input_weight, "output_weight": output_weight}
    for name, cost in costs.items():
        if not isinstance(cost, numbers.Real) or not 0 <= cost <= 1e6:
            raise ValueError(f"{name}={cost!r} must be a number in [0, 1e6]")
    if input_weight == output_weight == 0:
        raise ValueError(
            "input_weight=0 and output_weight=0 charge nothing; raise one of them"
        )

    def cost_of(user: User, prompt_tokens: int, output_tokens: int) -> int:
        weight = weights.get(user, 1.0) if user is not None else 1.0
        each = (round(UNIT * cost / weight) for cost in (input_weight, output_weight))
        prompt_token, output_token = each
        return prompt_token * prompt_tokens + output_token * output_tokens

    def rank(state: _Books, view: View, now_s: float) -> tuple[float, Order]:
        tag = -math.inf
        if not view.running:
            account = state.accounts.get(view.user, _NEW)
            tag = (account.shown + account.ahead.get(view.index, 0)) / UNIT
        return 0, (tag, view.arrival_s, view.index)

    def update(
        state: _Books, events: Sequence[Event], view_of: ViewOf
    ) -> tuple[_Books, Collection[int]]:
        ledger = _Ledger(state)
        for event in events:
            index, data = event.data["index"], event.data
            match event.kind:
                case "arrived":
                    user = data["user"]
                    ledger.arrive(index, user, cost_of(user, data["prompt_tokens"], 0))
                case "progressed":
                    user = ledger.user_of(index)
                    ledger.charge(user, cost_of(user, 0, data["output_tokens"]))
                case "admitted":
                    ledger.admit(index)
                case "preempted":
                    ledger.displace(index)
                case "finished":
                    ledger.end(index)
        lets_in = any(e.kind != "progressed" or e.data["prompt_tokens"] for e in events)
        stale = ledger.show() if lets_in else ()
        return ledger.close(), stale

    return Policy(
        init=lambda: _NOBODY,
        rank=rank,
        update=update,
        until=never,
        allow=unlimited,
    )


class _Ledger:
    """A copy of the books that one update writes in."""

    def __init__(self, books: _Books):
        self._accounts = dict(books.accounts)
        self._user_of = dict(books.user_of)
        self._floor = books.floor
        self._last = books.last
        self._moved: set[User] = set()  # whose waiting requests are not as they were

    def _requeue(self, user: User, waiting: Mapping[int, int]) -> None:
        account = self._accounts[user]
        if account.waiting and not waiting:
            self._last = user
        self._accounts[user] = account._replace(waiting=waiting)
        self._moved.add(user)

    def _raise_floor(self) -> None:
        queued = [a.counter for a in self._accounts.values() if a.waiting]
        last = self._accounts.get(self._last, _NEW).counter
        self._floor = max(self._floor, min(queued, default=last))

    def user_of(self, index: int) -> User:
        """Whose request it is."""
        return self._user_of[index]

    def arrive(self, index: int, user: User, cost: int) -> None:
        """A request waits; one of a user with nothing waiting lifts the counter."""
        account = self._accounts.get(user, _NEW)
        if not account.waiting:
            self._raise_floor()
            account = account._replace(counter=max(account.counter, self._floor))
        self._user_of[index] = user
        self._accounts[user] = account._replace(live=account.live + 1)
        self._requeue(user, {**account.waiting, index: cost})

    def charge(self, user: User, cost: int) -> None:
        """The user was served."""
        account = self._accounts[user]
        self._accounts[user] = account._replace(counter=account.counter + cost)

    def admit(self, index: int) -> None:
        """A waiting request took a slot; its prompt is charged if it was not before."""
        user = self._user_of[index]
        waiting = dict(self._accounts[user].waiting)
        self.charge(user, waiting.pop(index))
        self._requeue(user, waiting)

    def displace(self, index: int) -> None:
        """A request lost its slot, and waits with nothing left to charge."""
        user = self._user_of[index]
        self._requeue(user, {index: 0, **self._accounts[user].waiting})

    def end(self, index: int) -> None:
        """A request ended, perhaps while it waited."""
        user = self._user_of.pop(index)
        account = self._accounts[user]
        self._accounts[user] = account._replace(live=account.live - 1)
        if index in account.waiting:
            left = {i: cost for i, cost in account.waiting.items() if i != index}
            self._requeue(user, left)

    def show(self) -> set[int]:
        """Let ranks see the counters; the waiting requests whose rank may change."""
        stale: set[int] = set()
        for user, account in self._accounts.items():
            if account.counter == account.shown and user not in self._moved:
                continue
            costs = account.waiting.values()
            before = itertools.accumulate(costs, initial=0)
            ahead = dict(zip(account.waiting, before, strict=False))
            shown = account._replace(shown=account.counter, ahead=ahead)
            self._accounts[user] = shown
            stale.update(account.waiting)
        return stale

    def close(self) -> _Books:
        """The new books. Users whom a lift would raise to the floor are forgotten, and
        of other idle ones those served least, down to MAX_IDLE_USERS. Once no request
        is left all are, and those who come next start as equals."""
        if not self._user_of:
            return _NOBODY
        self._raise_floor()
        kept, idle = {}, {}
        for user, account in self._accounts.items():
            if account.live or user == self._last:
                kept[user] = account
            elif account.counter > self._floor:
                idle[user] = account
        if len(idle) > MAX_IDLE_USERS:
            by_service = sorted(idle.items(), key=lambda item: item[1].counter)
            idle = dict(by_service[-MAX_IDLE_USERS:])
        return _Books(kept | idle, self._user_of, self._floor, self._last)
