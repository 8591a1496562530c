"""Output length predictors: pure functions over explicit state, for policies to use.

Owns what is learned from the lengths of requests that have ended. Never sees a
request's tokens, its rank or its slot; only `oracle` sees true lengths, by its
construction.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxserve.core import Event
from jaxserve.scheduling.policies.base import View, ViewOf

State = Any


class LengthPredictor(NamedTuple):
    """Guesses how many tokens a request will put out in all. Every function is pure.

    A trained network fits as it is: its weights are the state that `init` returns, and
    `predict` evaluates it.

    Attributes:
      init: () -> state.
      predict: (state, view) -> output tokens expected, those it already has included;
        at least 1, at most `view.max_output_tokens`.
      update: (state, events, view_of) -> state: learns from the requests that ended.
        Takes the events and the `view_of` of `Policy.update`.
    """

    init: Callable[[], State]
    predict: Callable[[State, View], float]
    update: Callable[[State, Sequence[Event], ViewOf], State]


def check_is_predictor(value: object) -> None:
    """Refuse what is no LengthPredictor, such as a function that makes one.

    Raises:
      ValueError: it is none.
    """
    if not isinstance(value, LengthPredictor):
        hint = "call the function that makes it" if callable(value) else "as history()"
        raise ValueError(f"predictor={value!r} must be a LengthPredictor; {hint}")


def _possible(tokens: float, view: View) -> float:
    return min(max(float(tokens), 1.0), float(view.max_output_tokens))


def _ended(events: Sequence[Event], view_of: ViewOf) -> Iterator[tuple[View, int]]:
    """Requests that ran to their end, and their output lengths in tokens."""
    for event in events:
        if event.kind == "finished" and event.data["reason"] != "abort":
            yield view_of(event.data["index"]), event.data["output_tokens"]


def oracle(
    truth: Mapping[int, int], noise: float = 0.0, seed: int = 0
) -> LengthPredictor:
    """The truth, blurred: true length times exp(noise * z), z standard normal.

    z depends on (seed, index) alone, so that every policy and every order of calls sees
    the same guesses. noise 0 is the exact length, 1 about as good as a small classifier
    (Kendall's tau about 0.55 on heavy-tailed lengths).

    Args:
      truth: output tokens by submission index; may grow while the engine runs.
      noise: standard deviation of the log of the error. seed: an integer >= 0.

    Raises:
      ValueError: an argument breaks its rule, or the truth lacks a request.
    """
    if not isinstance(noise, numbers.Real) or not 0 <= noise < math.inf:
        raise ValueError(f"noise={noise!r} must be a number >= 0; 0 is the exact truth")
    if not isinstance(seed, numbers.Integral) or seed < 0:
        raise ValueError(f"seed={seed!r} must be an integer >= 0")

    def predict(state: State, view: View) -> float:
        if view.index not in truth:
            raise ValueError(
                f"truth has no request {view.index}; give the oracle the length of "
                "every submission index of the workload"
            )
        factor = 1.0
        if noise:
            z = np.random.default_rng((seed, view.index)).standard_normal()
            factor = math.exp(noise * z)
        return _possible(truth[view.index] * factor, view)

    return LengthPredictor(
        init=lambda: None,
        predict=predict,
        update=lambda state, events, view_of: state,
    )


class _Lengths(NamedTuple):
    """Output lengths of the latest requests to end, oldest first."""

    all: tuple[int, ...] = ()
    by_key: Mapping[Hashable, tuple[int, ...]] = {}  # the latest key to learn is last


def history(
    key: str | Callable[[View], Hashable] = "user",
    quantile: float = 0.5,
    window: int = 100,
    max_keys: int = 1000,
) -> LengthPredictor:
    """A quantile of the latest output lengths of requests of the same kind.

    A kind with no history takes all requests together, and without any the guess is
    max_tokens. A request whose key is None is of no kind. Lengths cut off by max_tokens
    count as they are.

    Args:
      key: "user", the name of a tag, or a function of the view.
      quantile: in [0, 1], linear between neighbours as in `numpy.quantile`.
      window: lengths remembered of each kind, and of all together.
      max_keys: kinds remembered; the one that learned longest ago goes first.

    Raises:
      ValueError: an argument breaks its rule.
    """
    if not (callable(key) or isinstance(key, str)):
        raise ValueError(
            f"key={key!r} must be 'user', a tag's name or a function of the view"
        )
    if not isinstance(quantile, numbers.Real) or not 0 <= quantile <= 1:
        raise ValueError(f"quantile={quantile!r} must be in [0, 1]; 0.5 is the median")
    for name, value in (("window", window), ("max_keys", max_keys)):
        if not isinstance(value, numbers.Integral) or value < 1:
            raise ValueError(f"{name}={value!r} must be an integer >= 1")

    def key_of(view: View) -> Hashable:
        if callable(key):
            return key(view)
        return view.user if key == "user" else view.tags.get(key)

    def predict(state: _Lengths, view: View) -> float:
        lengths = state.by_key.get(key_of(view)) or state.all
        if not lengths:
            return float(view.max_output_tokens)
        return _possible(float(np.quantile(lengths, quantile)), view)

    def update(state: _Lengths, events: Sequence[Event], view_of: ViewOf) -> _Lengths:
        ended = list(_ended(events, view_of))
        if not ended:
            return state
        latest, by_key = state.all, dict(state.by_key)
        for view, tokens in ended:
            latest = (*latest, tokens)[-window:]
            kind = key_of(view)
            if kind is not None:
                by_key[kind] = (*by_key.pop(kind, ()), tokens)[-window:]
        while len(by_key) > max_keys:
            del by_key[next(iter(by_key))]
        return _Lengths(latest, by_key)

    return LengthPredictor(init=_Lengths, predict=predict, update=update)


SHORT_PHRASES = (
    "briefly",
    "in brief",
    "concise",
    "in one sentence",
    "in one word",
    "yes or no",
    "short answer",
    "简短",
    "简要",
    "一句话",
)
"""Phrases that ask for a short answer, in lower case."""

LONG_PHRASES = (
    "in detail",
    "detailed",
    "step by step",
    "explain",
    "essay",
    "comprehensive",
    "详细",
    "一步一步",
    "逐步",
)
"""Phrases that ask for a long answer, in lower case."""

_PRIOR = np.array(
    [math.log(1 + 128), 0.0, 0.0]  # about 128 tokens, whatever the sizes
    + [-1.0] * len(SHORT_PHRASES)  # each divides by e,
    + [0.5] * len(LONG_PHRASES)  # and each multiplies by 1.65
)


def _signals(view: View) -> np.ndarray:
    """f64[3 + phrases]: 1, log prompt length, log max_tokens, counts of the phrases.

    The logs are taken from typical sizes, 256 and 1024 tokens, so that the prior's
    constant is a guess for a typical request.
    """
    text = (view.text or "").lower()
    prompt = math.log(view.prompt_tokens / 256)
    limit = math.log(view.max_output_tokens / 1024)
    counts = [text.count(phrase) for phrase in SHORT_PHRASES + LONG_PHRASES]
    return np.array([1.0, prompt, limit, *counts])


class _Fit(NamedTuple):
    """A Gaussian belief about the weights; arrays are replaced, never written to."""

    weights: np.ndarray  # f64[F]
    covariance: np.ndarray  # f64[F, F], in units of the noise's variance


def prompt_signals() -> LengthPredictor:
    """What the prompt tells: its length, max_tokens, and phrases such as "briefly".

    log(1 + output tokens) is taken as linear in the signals, and the weights are fitted
    by recursive least squares: after any number of requests they are the ridge
    regression of all of them around the prior (unit penalty on each weight's distance
    from it). The prior: 128 tokens, divided by e for each phrase of SHORT_PHRASES,
    times 1.65 for each of LONG_PHRASES. Prompts given as token ids have no phrases. The
    guess is exp of a mean of logs: nearer the median than the mean, and what ranks by
    it needs no more. (Lexical signals for a serial server: Clairvoyant, 2026.)
    """

    def predict(state: _Fit, view: View) -> float:
        top = math.log1p(view.max_output_tokens)
        log_tokens = min(float(state.weights @ _signals(view)), top)
        return _possible(math.expm1(log_tokens), view)

    def update(state: _Fit, events: Sequence[Event], view_of: ViewOf) -> _Fit:
        for view, tokens in _ended(events, view_of):
            signals = _signals(view)
            spread = state.covariance @ signals
            gain = spread / (1.0 + signals @ spread)
            error = math.log1p(tokens) - state.weights @ signals
            state = _Fit(
                state.weights + gain * error,
                state.covariance - np.outer(gain, spread),
            )
        return state

    return LengthPredictor(
        init=lambda: _Fit(_PRIOR, np.eye(len(_PRIOR))), predict=predict, update=update
    )
