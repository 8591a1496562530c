"""By predicted output length: sjf, srpt and hrrn.

Owns the guess made of each live request. Never sees a true length, unless the
predictor is the oracle.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from jaxserve.core import Event
from jaxserve.scheduling.policies.base import (
    Order,
    Policy,
    View,
    ViewOf,
    never,
    unlimited,
    unmoved,
)
from jaxserve.scheduling.policies.combine import bounded_wait
from jaxserve.scheduling.predictors import LengthPredictor, check_is_predictor


class _Guesses(NamedTuple):
    """What the predictor has learned, and its guess of each live request."""

    predictor: Any
    tokens: Mapping[int, float]  # by submission index; made once, at arrival


Update = Callable[[_Guesses, Sequence[Event], ViewOf], _Guesses]


def _guess_at_arrival(
    predictor: LengthPredictor,
) -> tuple[Callable[[], _Guesses], Update]:
    """The init and update that keep one guess for each live request.

    A request is judged once, when it arrives, by what had been learned until then. So
    no key goes stale when the predictor learns, a plan costs nothing for those who
    wait, and nobody is moved back by what others did. The price: those that arrive
    before anything is learned keep their first guess.
    """

    check_is_predictor(predictor)

    def update(state: _Guesses, events: Sequence[Event], view_of: ViewOf) -> _Guesses:
        learned = predictor.update(state.predictor, events, view_of)
        changes = [e for e in events if e.kind in ("arrived", "finished")]
        if not changes:
            return _Guesses(learned, state.tokens)
        tokens = dict(state.tokens)
        for event in changes:
            index = event.data["index"]
            if event.kind == "arrived":
                tokens[index] = predictor.predict(learned, view_of(index))
            else:
                tokens.pop(index, None)
        return _Guesses(learned, tokens)

    return lambda: _Guesses(predictor.init(), {}), update


def sjf(predictor: LengthPredictor, skip_limit: int | None = None) -> Policy:
    """Shortest predicted output first, first come first served among equals.

    Never displaces: a long request that has its slot keeps it, and whoever runs goes on
    before newcomers. A lack of memory takes the slot of the longest; what lost its slot
    keeps its key, and so its place before longer ones. A long request may wait without
    end while shorter ones keep arriving.

    Judged at arrival, as in SSJF (Qiu et al. 2024, with a proxy model's guess) and in
    vLLM-LTR (Fu et al., "Efficient LLM Scheduling by Learning to Rank", NeurIPS 2024).

    Args:
      predictor: guesses output lengths; it learns from the requests that end.
      skip_limit: bounds the wait by `bounded_wait`; None does not.
    """
    init, learn = _guess_at_arrival(predictor)

    def rank(state: _Guesses, view: View, now_s: float) -> tuple[float, Order]:
        tokens = state.tokens.get(view.index)
        if tokens is None:  # no event has told of it yet
            tokens = predictor.predict(state.predictor, view)
        return 0, (not view.running, tokens, view.arrival_s, view.index)

    policy = Policy(
        init=init,
        rank=rank,
        update=lambda state, events, view_of: (learn(state, events, view_of), ()),
        until=never,
        allow=unlimited,
    )
    return policy if skip_limit is None else bounded_wait(policy, skip_limit)


class _Progress(NamedTuple):
    """The guesses, and how far each live request has come."""

    guesses: _Guesses
    output: Mapping[int, int]  # output tokens read so far, by submission index


def srpt(
    predictor: LengthPredictor,
    preempt_until: float = 0.5,
    max_preemptions: int = 4,
) -> Policy:
    """Shortest predicted remaining output first, displacing longer ones that run.

    The class is the predicted tokens still to come, at least 1: a request that has
    outlived its guess counts as nearly done. Only output that was read counts. A
    running request gives way to a strictly shorter one, and only as long as both hold:

    - it has put out less than `preempt_until` of its predicted length (TRAIL, Shahout
      et al., ICLR 2025): late displacement loses most work and gains least;
    - it was displaced, or lost its slot for memory, less than `max_preemptions` times.

    So it cannot thrash: guesses do not change, so whoever displaced another stays the
    shorter of the two, unless what the other had in flight makes that one the shorter;
    and no request is computed again without end. A long request may wait without end,
    as under `sjf`.

    Args:
      predictor: guesses output lengths, once, at arrival.
      preempt_until: in [0, 1]. 0 never displaces; 1 does until the guess is outlived.
      max_preemptions: an integer >= 0; 0 never displaces.

    Raises:
      ValueError: an argument breaks its rule.
    """
    if not isinstance(preempt_until, numbers.Real) or not 0 <= preempt_until <= 1:
        raise ValueError(
            f"preempt_until={preempt_until!r} must be in [0, 1], a share of the "
            "predicted length; 0 never displaces"
        )
    whole = isinstance(max_preemptions, numbers.Integral)
    if not whole or isinstance(max_preemptions, bool) or max_preemptions < 0:
        raise ValueError(
            f"max_preemptions={max_preemptions!r} must be an integer >= 0; "
            "0 never displaces"
        )
    init, learn = _guess_at_arrival(predictor)

    def rank(state: _Progress, view: View, now_s: float) -> tuple[float, Order]:
        guessed = state.guesses.tokens.get(view.index)
        if guessed is None:  # no event has told of it yet
            guessed = predictor.predict(state.guesses.predictor, view)
        output = state.output.get(view.index, 0)
        late = output >= preempt_until * guessed
        settled = view.running and (late or view.preemptions >= max_preemptions)
        klass = 0.0 if settled else max(guessed - output, 1.0)
        return klass, (view.arrival_s, view.index)

    def update(
        state: _Progress, events: Sequence[Event], view_of: ViewOf
    ) -> tuple[_Progress, Collection[int]]:
        guesses = learn(state.guesses, events, view_of)
        output, stale = dict(state.output), set()
        for event in events:
            index = event.data["index"]
            if event.kind == "finished":
                output.pop(index, None)
            elif event.kind == "progressed" and event.data["output_tokens"]:
                before = output.get(index, 0)
                output[index] = before + event.data["output_tokens"]
                early = before < preempt_until * guesses.tokens.get(index, 0)
                if early or not view_of(index).running:
                    stale.add(index)
        return _Progress(guesses, output), stale

    return Policy(
        init=lambda: _Progress(init(), {}),
        rank=rank,
        update=update,
        until=never,
        allow=unlimited,
    )


def hrrn(predictor: LengthPredictor | None = None) -> Policy:
    """Highest response ratio next (Brinch Hansen 1971): short ones first, until the
    long have waited in proportion. Nobody is displaced.

    The ratio is (wait + service) / service = 1 + wait / service. Service is counted in
    tokens, prompt and predicted output; the seconds that a token takes would scale all
    of wait / service alike, so the order does not need them. The wait counts from
    arrival. Its bound: a request of s tokens that has waited w goes before any of s'
    tokens that has waited less than w * s' / s.

    Args:
      predictor: guesses output lengths, once, at arrival. None takes
        max_output_tokens, which says nothing where no request asks for less than the
        rest: then it is FCFS.
    """
    guesses = predictor is not None
    init, learn = _guess_at_arrival(predictor) if guesses else (lambda: None, None)

    def output_tokens(state: _Guesses | None, view: View) -> float:
        if predictor is None or state is None:
            return view.max_output_tokens
        guessed = state.tokens.get(view.index)
        return predictor.predict(state.predictor, view) if guessed is None else guessed

    def rank(state: _Guesses | None, view: View, now_s: float) -> tuple[float, Order]:
        place = (view.arrival_s, view.index)
        if view.running:
            return 0, (0, *place)
        service_tokens = view.prompt_tokens + output_tokens(state, view)
        return 0, (1, -(now_s - view.arrival_s) / service_tokens, *place)

    def update(
        state: Any, events: Sequence[Event], view_of: ViewOf
    ) -> tuple[Any, Collection[int]]:
        return (learn(state, events, view_of) if learn else state), ()

    return Policy(
        init=init,
        rank=rank,
        update=update if learn else unmoved,
        until=lambda state, view, now_s: None if view.running else now_s,
        allow=unlimited,
    )
