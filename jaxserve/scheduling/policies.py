"""Who comes first: scheduling policies as pure functions over explicit state.

Owns the Policy interface (after optax's GradientTransformation: functions over a state
that the caller keeps) and the policies. A policy never sees the scheduler, a block or
the length that an output will have.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from jaxserve.core import Event

State = Any
Order = tuple[float | int | str, ...]


class View(NamedTuple):
    """What a policy may know of a request."""

    index: int  # submission index: unique, in order of submission
    arrival_s: float
    prompt_tokens: int
    output_tokens: int  # those in flight counted: exact unless the request ends in them
    max_output_tokens: int
    cached_tokens: int | None  # found at first admission; None before it
    running: bool
    preemptions: int
    priority: int  # lower first
    user: str | None
    deadline_s: float | None  # absolute, for the last token
    tags: Mapping[str, str]


class Policy(NamedTuple):
    """An order over requests. Every function is pure; the scheduler keeps the state.

    Attributes:
      init: () -> state.
      rank: (state, view, now_s) -> (class, order); smaller first, compared as a pair.
        Only a request of strictly smaller class displaces a running one. Equal pairs
        fall back to running first, then preempted first, then submission order.
      update: (state, events) -> (state, stale): after each launch is read. `stale`
        holds the submission indices whose rank may have changed, or is None for all.
        Events carry `data["index"]`, and are those of `core.EVENT_FIELDS` that name a
        request.
      until: (state, view, now_s) -> the earliest time at which the rank may differ with
        nothing marking it stale; None = never, now_s = every plan.
      allow: (state, view) -> tokens before the rank may change (a quantum), or None.
    """

    init: Callable[[], State]
    rank: Callable[[State, View, float], tuple[int, Order]]
    update: Callable[[State, Sequence[Event]], tuple[State, Collection[int] | None]]
    until: Callable[[State, View, float], float | None]
    allow: Callable[[State, View], int | None]


def fcfs() -> Policy:
    """First come, first served: by arrival, preempted requests keep their place.

    Fair in waiting order and free of starvation; a long request delays all behind it.
    """
    return Policy(
        init=lambda: None,
        rank=lambda state, view, now_s: (0, (view.arrival_s, view.index)),
        update=lambda state, events: (state, ()),
        until=lambda state, view, now_s: None,
        allow=lambda state, view: None,
    )


POLICIES: dict[str, Callable[[], Policy]] = {"fcfs": fcfs}


def get_policy(name: str) -> Policy:
    """The policy of that name; an unknown name lists the known ones."""
    if name not in POLICIES:
        raise ValueError(
            f"scheduling_policy={name!r} is unknown; known are {sorted(POLICIES)}"
        )
    return POLICIES[name]()
