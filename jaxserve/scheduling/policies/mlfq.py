"""Multi-level feedback queue: who has put out little goes first.

Owns the ladder of levels and the boosts. Never sees a predicted or a true length.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import numbers
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from jaxserve.core import Event
from jaxserve.scheduling.policies.base import Order, Policy, View, ViewOf

PATIENCE = 10
"""At the first boost this many intervals after a request's arrival or later, newcomers
cease to pass it."""

PAYBACK = 4
"""New tokens at the top for each one that a lifted request had put out before."""


class _State(NamedTuple):
    """What the levels of the live requests follow from.

    Attributes:
      boost_s: when the next boost is.
      output: tokens read so far, by submission index.
      zero: by submission index, the output length that is 0 on the ladder: a request
        with n output tokens stands at n - zero. Below 0 is the top level as well.
    """

    boost_s: float
    output: Mapping[int, int]
    zero: Mapping[int, int]


@dataclasses.dataclass(frozen=True)
class _Ladder:
    """The levels, and when all are lifted to the top; see `mlfq`."""

    quanta: tuple[int, ...]
    period_s: float  # infinite: never
    skip_join: bool

    @property
    def ends(self) -> tuple[int, ...]:
        """Where on the ladder each level but the last ends."""
        return tuple(itertools.accumulate(self.quanta))

    def start(self, prompt_tokens: int) -> int:
        """The zero of a request that arrives."""
        if not self.skip_join:
            return 0
        fits = (i for i, q in enumerate(self.quanta) if q >= prompt_tokens)
        return -sum(self.quanta[: next(fits, None)])

    def lifted(self, output: int) -> int:
        """The zero of a request that is boosted with so many tokens put out."""
        stay = max(*self.quanta, PAYBACK * output)
        return output + stay - self.quanta[0] if output else 0

    def boost_after(self, now_s: float) -> float:
        """When the first boost later than that is."""
        if self.period_s == math.inf:
            return math.inf
        boost_s = (now_s // self.period_s + 1) * self.period_s
        # Rounding may leave it at now, and so may a clock too coarse for the interval.
        return boost_s if boost_s > now_s else math.nextafter(now_s, math.inf)


def mlfq(
    quanta: Sequence[int] = (32, 128, 512),
    boost_interval_s: float | None = 30.0,
    skip_join: bool = False,
) -> Policy:
    """Multi-level feedback queue: who has put out little goes first, at any length.

    Everybody starts at level 0. A request that has put out the quantum of its level
    drops one level; the last level has no quantum. The class is the level, so lower
    levels get the slots that higher ones leave, and a request of a higher level
    displaces a running one of a lower. Within a level, by arrival. A quantum counts
    output tokens, and the scheduler plans none beyond it. (FastServe: Wu et al., "Fast
    Distributed Inference Serving for Large Language Models", NSDI 2026.)

    Newcomers get their first tokens at once, and short requests all of theirs, with no
    guess of lengths. The price is paid by long ones, in gaps and recomputation. Where
    lengths vary less than geometric ones (CV^2 < 1) it loses to FCFS on mean time.

    At each multiple of boost_interval_s on the engine's clock all are lifted to the
    top. Nobody is displaced by that, for all are equals then. But whoever drops again
    would be displaced by those lifted that wait, at the price of computing two contexts
    again for a few tokens. So a request that was lifted works at the top for the
    largest quantum, or PAYBACK times the tokens it had put out if that is more, and
    then drops to level 1. Newcomers pass the lifted in the queue for a slot; so that
    nobody starves, they do so for PATIENCE intervals only.

    Args:
      quanta: output tokens of each level but the last; three give the usual four.
      boost_interval_s: seconds between boosts; None never boosts: then the lowest level
        may starve.
      skip_join: a request starts at the first level whose quantum is not smaller than
        its prompt, both in tokens, so that long prompts hold up no short ones
        (FastServe's skip-join).

    Raises:
      ValueError: an argument breaks its rule.
    """
    several = isinstance(quanta, Sequence) and len(quanta) > 0
    if not several or not all(
        isinstance(q, numbers.Integral) and not isinstance(q, bool) and q >= 1
        for q in quanta
    ):
        raise ValueError(
            f"quanta={quanta!r} must hold integers >= 1: the output tokens of each "
            "level but the last"
        )
    if not isinstance(skip_join, bool):
        raise ValueError(f"skip_join={skip_join!r} must be True or False")
    period_s = math.inf if boost_interval_s is None else boost_interval_s
    if not isinstance(period_s, numbers.Real) or not period_s > 0:
        raise ValueError(
            f"boost_interval_s={boost_interval_s!r} must be a number > 0, or None "
            "for no boost"
        )
    return _feedback(_Ladder(tuple(quanta), period_s, skip_join))


def _feedback(ladder: _Ladder) -> Policy:
    ends = ladder.ends

    def stands(state: _State, view: View) -> int:
        zero = state.zero.get(view.index)
        if zero is None:  # no event has told of it yet
            zero = ladder.start(view.prompt_tokens)
        return view.output_tokens - zero

    def rank(state: _State, view: View, now_s: float) -> tuple[float, Order]:
        boost_s, at, lifted = state.boost_s, stands(state, view), False
        if now_s >= boost_s:  # it is due, and no event has come since
            boost_s, at, lifted = ladder.boost_after(now_s), 0, view.output_tokens > 0
        level = bisect.bisect_right(ends, at)
        lifted |= level == 0 and at < view.output_tokens
        old = boost_s - view.arrival_s >= (PATIENCE + 1) * ladder.period_s
        return level, (lifted and not old, view.arrival_s, view.index)

    def update(
        state: _State, events: Sequence[Event], view_of: ViewOf
    ) -> tuple[_State, Collection[int] | None]:
        output, zero = dict(state.output), dict(state.zero)
        for event in events:
            index, data = event.data["index"], event.data
            if event.kind == "arrived":
                output[index], zero[index] = 0, ladder.start(data["prompt_tokens"])
            elif event.kind == "progressed":
                output[index] += data["output_tokens"]
            elif event.kind == "finished":
                del output[index], zero[index]
        now_s = max((event.time_s for event in events), default=-math.inf)
        if now_s < state.boost_s:
            return _State(state.boost_s, output, zero), ()
        zero = {index: ladder.lifted(n) for index, n in output.items()}
        return _State(ladder.boost_after(now_s), output, zero), None

    def until(state: _State, view: View, now_s: float) -> float | None:
        due_s = state.boost_s if now_s < state.boost_s else ladder.boost_after(now_s)
        return due_s if due_s < math.inf else None

    def allow(state: _State, view: View) -> int | None:
        at = stands(state, view)
        level = bisect.bisect_right(ends, at)
        return ends[level] - at if level < len(ends) else None

    return Policy(
        init=lambda: _State(ladder.period_s, {}, {}),
        rank=rank,
        update=update,
        until=until,
        allow=allow,
    )
