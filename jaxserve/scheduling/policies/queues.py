"""Queues: policies that order requests by what they are, not by what they did.

Owns fcfs, priority and edf, which keep no state. Never sees an output.
"""

from __future__ import annotations

import math
import numbers

from jaxserve.scheduling.policies.base import (
    Order,
    Policy,
    View,
    never,
    unlimited,
    unmoved,
)


def fcfs() -> Policy:
    """First come, first served: by arrival, preempted requests keep their place.

    Fair in waiting order and free of starvation; a long request delays all behind it.
    """
    return Policy(
        init=lambda: None,
        rank=lambda state, view, now_s: (0, (view.arrival_s, view.index)),
        update=unmoved,
        until=never,
        allow=unlimited,
    )


def priority(aging_s: float | None = None) -> Policy:
    """Lower number first, FCFS among equals; the number is the class.

    So a strictly higher priority displaces a running lower one for its slot or its
    blocks, and equals never do. Without ageing, low priorities may wait for ever.

    Args:
      aging_s: a request gains one level every so many seconds since its arrival, None
        = never. At its level a request stands by the time at which it reaches level 0,
        arrival_s + priority * aging_s: a fixed order, so that of two requests it is
        always the same one that passes or displaces the other, and none ping-pong.
        For the same reason ageing goes on while a request runs: if its level stood
        still, all that wait beside it would displace it in time, and it them. A
        request waits only for those that reach level 0 before it does: no newcomer of
        priority p passes one of priority q that arrived (q - p) * aging_s earlier.

    Raises:
      ValueError: aging_s is no number, or under 1e-6.
    """
    if aging_s is None:
        return fcfs()._replace(
            rank=lambda state, view, now_s: (
                view.priority,
                (view.arrival_s, view.index),
            )
        )
    if not isinstance(aging_s, numbers.Real) or not 1e-6 <= aging_s < math.inf:
        raise ValueError(
            f"aging_s={aging_s!r} must be a number of seconds >= 1e-6, or None for no "
            "ageing"
        )
    step_s = float(aging_s)

    def zero_s(view: View) -> float:
        return view.arrival_s + view.priority * step_s

    def level(zero_s: float, now_s: float) -> int:
        """The smallest k with zero_s - k * step_s <= now_s, to the last bit."""
        k = math.ceil((zero_s - now_s) / step_s)
        if zero_s - k * step_s > now_s:
            return k + 1
        return k - 1 if zero_s - (k - 1) * step_s <= now_s else k

    def rank(state: None, view: View, now_s: float) -> tuple[float, Order]:
        zero = zero_s(view)
        return level(zero, now_s), (zero, view.arrival_s, view.index)

    def until(state: None, view: View, now_s: float) -> float:
        zero = zero_s(view)
        return zero - (level(zero, now_s) - 1) * step_s

    return fcfs()._replace(rank=rank, until=until)


def edf(preempt: bool = False) -> Policy:
    """Earliest deadline first (Liu and Layland 1973); those without one come last.

    FCFS among equal deadlines. Nobody is displaced by default: EDF is optimal where
    displacing costs nothing, one request runs at a time and all deadlines can be met.
    Here a displaced request computes its context again, those that run share each
    step, and past saturation requests that are late already would displace those that
    are not yet. A late request keeps its place; without deadlines the wait is
    unbounded.

    Args:
      preempt: the deadline is the class: an earlier one displaces a running later one.
        Deadlines are fixed, so of two requests only one can ever displace the other.

    Raises:
      ValueError: preempt is not True or False.
    """
    if not isinstance(preempt, bool):
        raise ValueError(f"preempt={preempt!r} must be True or False")

    def rank(state: None, view: View, now_s: float) -> tuple[float, Order]:
        due_s = math.inf if view.deadline_s is None else view.deadline_s
        return due_s if preempt else 0, (due_s, view.arrival_s, view.index)

    return fcfs()._replace(rank=rank)
