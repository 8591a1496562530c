"""What a scheduling policy is: pure functions over explicit state.

Owns the Policy interface (after optax's GradientTransformation: functions over a state
that the caller keeps). A policy never sees the scheduler, a block or the length that an
output will have.
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
    cached_tokens: int  # context in the prefix cache: now, or at the last admission
    running: bool
    preemptions: int
    priority: int  # lower first
    user: str | None
    deadline_s: float | None  # absolute, for the last token
    tags: Mapping[str, str]
    text: str | None  # the prompt's, where the caller gave one


ViewOf = Callable[[int], View]


class Policy(NamedTuple):
    """An order over requests. Every function is pure; the scheduler keeps the state.

    Attributes:
      init: () -> state.
      rank: (state, view, now_s) -> (class, order); smaller first, compared as a pair.
        Only a request of strictly smaller class displaces a running one. Equal pairs
        fall back to running first, then preempted first, then submission order. Let
        classes settle: a policy that raises a request's class again before it has
        computed its prompt keeps it from ever finishing.
      update: (state, events, view_of) -> (state, stale): after each launch is read.
        `stale` holds the submission indices whose rank may have changed, or is None for
        all. Events carry `data["index"]`, and are those of `core.EVENT_FIELDS` that
        name a request; "progressed" ones of several launches may come as one.
        `view_of(index)` is the view of a request that an event names, also of one that
        has just ended.
      until: (state, view, now_s) -> the earliest time at which the rank may differ with
        nothing marking it stale; None = never, now_s = every plan.
      allow: (state, view) -> tokens before the rank may change (a quantum), or None.
    """

    init: Callable[[], State]
    rank: Callable[[State, View, float], tuple[float, Order]]
    update: Callable[
        [State, Sequence[Event], ViewOf], tuple[State, Collection[int] | None]
    ]
    until: Callable[[State, View, float], float | None]
    allow: Callable[[State, View], int | None]


def check_is_policy(field: str, value: object) -> None:
    """Refuse what is no Policy, such as a function that makes one.

    Raises:
      ValueError: it is none.
    """
    if not isinstance(value, Policy):
        hint = "call the function that makes it" if callable(value) else "as fcfs() is"
        if isinstance(value, str):
            hint = f"get_policy({value!r}) makes one of a spec"
        raise ValueError(f"{field}={value!r} must be a Policy; {hint}")


def unmoved(
    state: State, events: Sequence[Event], view_of: ViewOf
) -> tuple[State, Collection[int]]:
    """An `update` of policies that learn nothing; the scheduler leaves it out."""
    return state, ()


def never(state: State, view: View, now_s: float) -> None:
    """An `until` of ranks that time does not change."""


def unlimited(state: State, view: View) -> None:
    """An `allow` of policies without a quantum; the scheduler leaves it out."""
