"""Guesses of output lengths: what they learn, from whom, and against numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from jaxserve.core import Event
from jaxserve.scheduling.policies import View
from jaxserve.scheduling.predictors import (
    LONG_PHRASES,
    SHORT_PHRASES,
    LengthPredictor,
    history,
    oracle,
    prompt_signals,
)
from tests.scheduling.policies.views import BLANK


def view(index: int = 0, **fields) -> View:
    sizes = {"prompt_tokens": 256, "max_output_tokens": 1024}
    return BLANK._replace(index=index, **{**sizes, **fields})


def learn(
    predictor: LengthPredictor,
    ended: Sequence[tuple[View, int]],
    reason: str = "stop",
    state: object = None,
):
    """The state after requests of these output lengths ended, one update for each."""
    state = predictor.init() if state is None else state
    for one, tokens in ended:
        data = {"index": one.index, "reason": reason, "output_tokens": tokens}
        event = Event("finished", 0.0, f"{one.index}", data)
        state = predictor.update(state, [event], {one.index: one}.__getitem__)
    return state


# The truth, blurred ---------------------------------------------------------------


def test_the_oracle_without_noise_tells_the_truth_within_what_is_possible() -> None:
    predictor = oracle({0: 1, 1: 700, 2: 5000})
    assert [predictor.predict(None, view(i)) for i in range(3)] == [1.0, 700.0, 1024.0]
    with pytest.raises(ValueError, match="truth has no request 3"):
        predictor.predict(None, view(3))


def test_noise_multiplies_by_a_lognormal_keyed_by_seed_and_index() -> None:
    truth = dict.fromkeys(range(4000), 100)
    wide = {"max_output_tokens": 10**9}
    one, two = oracle(truth, noise=0.5, seed=3), oracle(truth, noise=0.5, seed=3)
    forward = [one.predict(None, view(i, **wide)) for i in range(4000)]
    backward = [two.predict(None, view(i, **wide)) for i in reversed(range(4000))]
    assert forward == backward[::-1]
    z = np.log(np.array(forward) / 100) / 0.5
    # Standard normal: 4000 draws, within 4 standard errors.
    assert abs(z.mean()) < 4 / math.sqrt(4000)
    assert abs(z.std() - 1) < 4 / math.sqrt(2 * 4000)
    other = oracle(truth, noise=0.5, seed=4)
    assert other.predict(None, view(7, **wide)) != forward[7]
    # The same z at another noise.
    double = oracle(truth, noise=1.0, seed=3).predict(None, view(7, **wide))
    assert math.log(double / 100) == pytest.approx(2 * math.log(forward[7] / 100))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"noise": -0.1}, "noise=-0.1"),
        ({"seed": -1}, "seed=-1"),
        ({"noise": math.inf}, "noise=inf"),
        ({"noise": "1"}, "noise='1'"),
    ],
)
def test_the_oracle_refuses_what_makes_no_sense(fields, message) -> None:
    with pytest.raises(ValueError, match=message):
        oracle({}, **fields)


# History ----------------------------------------------------------------------------


def test_history_falls_back_from_the_user_to_all_to_max_tokens() -> None:
    predictor = history()
    ann, bob = view(0, user="ann"), view(1, user="bob", max_output_tokens=64)
    state = predictor.init()
    assert predictor.predict(state, ann) == 1024 and predictor.predict(state, bob) == 64
    state = learn(predictor, [(ann, 10), (ann, 20), (ann, 40)])
    assert predictor.predict(state, ann) == 20
    assert predictor.predict(state, view(2)) == 20  # nobody's: all together
    assert predictor.predict(state, bob) == 20
    state = learn(predictor, [(bob, 60), (bob, 62)], state=state)
    assert predictor.predict(state, bob) == 61 and predictor.predict(state, ann) == 20
    assert predictor.predict(state, view(2)) == 40  # of 10, 20, 40, 60, 62
    state = learn(predictor, [(bob, 900)] * 3, state=state)
    assert predictor.predict(state, bob) == 64  # never more than max_tokens


def test_history_ignores_aborts_and_what_did_not_end() -> None:
    predictor = history()
    state = learn(predictor, [(view(0, user="ann"), 10)], reason="abort")
    progress = Event("progressed", 0.0, "0", {"index": 0, "output_tokens": 5})
    state = predictor.update(state, [progress], lambda i: view(i, user="ann"))
    assert state == predictor.init()


@pytest.mark.parametrize("quantile", [0.0, 0.3, 0.5, 0.9, 1.0])
def test_history_is_numpys_quantile_of_the_window(quantile: float) -> None:
    predictor = history(key="app", quantile=quantile, window=7)
    lengths = np.random.default_rng(0).integers(1, 1000, 25).tolist()
    app = view(tags={"app": "chat"})
    other = view(tags={"app": "code"})
    state = predictor.init()
    for n, length in enumerate(lengths, start=1):
        state = learn(predictor, [(app, length), (other, 1)], state=state)
        expected = np.quantile(lengths[max(0, n - 7) : n], quantile)
        assert predictor.predict(state, app) == pytest.approx(expected)


def test_history_remembers_a_bounded_number_of_keys_the_latest() -> None:
    predictor = history(key=lambda v: v.index % 10, max_keys=3, window=2)
    state = learn(predictor, [(view(i), 100 + i) for i in (1, 2, 3, 1, 4)])
    guess = {i: predictor.predict(state, view(i)) for i in (1, 2, 3, 4)}
    # 2 learned longest ago. All together: the last two lengths, 101 and 104.
    assert guess == {1: 101, 2: 102.5, 3: 103, 4: 104}
    state = learn(predictor, [(view(i // 3), 1) for i in range(30)], state=state)
    assert len(state.by_key) == 3 and len(state.all) == 2
    assert all(len(lengths) == 2 for lengths in state.by_key.values())


def test_an_update_leaves_the_old_state_as_it_was() -> None:
    for predictor in (history(), prompt_signals()):
        before = learn(predictor, [(view(0, user="ann"), 9)])
        guess = predictor.predict(before, view(1, user="ann"))
        learn(predictor, [(view(2, user="ann"), 900)] * 5, state=before)
        assert predictor.predict(before, view(1, user="ann")) == guess


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quantile": 1.5}, r"quantile=1.5 must be in \[0, 1\]"),
        ({"quantile": "0.5"}, "quantile='0.5' must be"),
        ({"key": 3}, "key=3 must be 'user', a tag's name"),
        ({"window": 0}, "window=0 must be an integer >= 1"),
        ({"max_keys": 0.5}, "max_keys=0.5 must be an integer >= 1"),
    ],
)
def test_history_refuses_what_makes_no_sense(fields, message) -> None:
    with pytest.raises(ValueError, match=message):
        history(**fields)


# Signals of the prompt ----------------------------------------------------------------


def test_the_prior_is_as_documented() -> None:
    predictor = prompt_signals()

    def guess(text: str | None, **fields) -> float:
        return predictor.predict(predictor.init(), view(text=text, **fields))

    assert guess(None) == pytest.approx(128)
    assert guess("Who was Ada Lovelace?") == pytest.approx(128)
    assert guess("Answer BRIEFLY: who was she?") == pytest.approx(129 / math.e - 1)
    assert guess("请用简短的话回答") == pytest.approx(129 / math.e - 1)
    assert guess("Tell me in detail.") == pytest.approx(129 * math.sqrt(math.e) - 1)
    assert guess("请详细说明") == pytest.approx(129 * math.sqrt(math.e) - 1)
    assert guess("in detail, step by step") == pytest.approx(129 * math.e - 1)
    assert guess("briefly " * 40) == 1  # at least one token
    assert guess("in detail " * 4000, max_output_tokens=9) == 9  # and no overflow


def design(views: Sequence[View]) -> np.ndarray:
    """The signals, written down again from their description."""
    rows = []
    for one in views:
        text = (one.text or "").lower()
        rows.append(
            [
                1.0,
                math.log(one.prompt_tokens / 256),
                math.log(one.max_output_tokens / 1024),
            ]
            + [text.count(p) for p in (*SHORT_PHRASES, *LONG_PHRASES)]
        )
    return np.array(rows)


def test_the_fit_is_the_ridge_regression_around_the_prior() -> None:
    rng = np.random.default_rng(1)
    phrases = ["briefly", "in detail", "step by step", "简短", "hello", "逐步"]
    views = [
        view(
            i,
            prompt_tokens=int(rng.integers(1, 2000)),
            max_output_tokens=int(rng.integers(500, 5000)),
            text=" ".join(rng.choice(phrases, 2)) if i % 3 else None,
        )
        for i in range(60)
    ]
    lengths = rng.integers(1, 400, 60)
    predictor = prompt_signals()
    state = learn(predictor, list(zip(views, lengths.tolist(), strict=True)))
    x, y = design(views), np.log1p(lengths)
    prior = np.array(
        [math.log(129), 0, 0] + [-1.0] * len(SHORT_PHRASES) + [0.5] * len(LONG_PHRASES)
    )
    penalty = np.eye(x.shape[1])
    weights = prior + np.linalg.solve(x.T @ x + penalty, x.T @ (y - x @ prior))
    for one in views:
        tokens = math.exp((design([one]) @ weights).item()) - 1
        expected = min(max(tokens, 1), one.max_output_tokens)
        assert predictor.predict(state, one) == pytest.approx(expected, rel=1e-6)


def test_the_fit_learns_what_a_phrase_means_here() -> None:
    """In this workload "explain" asks for a long answer and a long prompt for a short
    one; after some hundred requests the guesses are within a few percent."""
    rng = np.random.default_rng(2)
    predictor = prompt_signals()

    def length(one: View) -> int:
        factor = 4 if one.text else 1
        return round(factor * 100 * math.sqrt(256 / one.prompt_tokens))

    views = [
        view(
            i,
            prompt_tokens=int(rng.integers(16, 1024)),
            text="Explain it" if i % 2 else None,
        )
        for i in range(800)
    ]
    state = learn(predictor, [(one, length(one)) for one in views])
    for one in views[:20]:
        assert predictor.predict(state, one) == pytest.approx(length(one), rel=0.05)
