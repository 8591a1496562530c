"""Log-probabilities and ranks, against numpy."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

from jaxserve.device import sampling
from tests.device.row_params import ROWS, VOCAB, softmax


@partial(jax.jit, static_argnames="width")
def logprobs(logits, tokens, wanted, *, width):
    return sampling.logprobs(logits, tokens, wanted, len(logits), width=width)


def test_logprobs_of_the_case() -> None:
    """SA5 (vllm#36746, TensorRT-LLM#7296): values and ranks of logits [9, 8, 7, 6]."""
    logits = np.tile(np.array([9, 8, 7, 6], np.float32), (4, 1))
    tokens = np.array([0, 3, 1, 2], np.int32)
    got = jax.device_get(logprobs(logits, tokens, np.ones(4, bool), width=3))
    values = [-0.4402, -1.4402, -2.4402, -3.4402]
    np.testing.assert_allclose(got.chosen, [values[t] for t in tokens], atol=5e-5)
    assert got.rank.tolist() == [1, 4, 2, 3]
    assert got.top_ids.tolist() == [[0, 1, 2]] * 4
    np.testing.assert_allclose(got.top, [values[:3]] * 4, atol=5e-5)


def test_logprobs_are_of_the_unscaled_distribution_and_ranks_count_what_is_above():
    rng = np.random.default_rng(3)
    logits = np.round(rng.normal(size=(ROWS, VOCAB)) * 3) / 2
    logits = logits.astype(np.float32)
    tokens = rng.integers(0, VOCAB, ROWS, np.int32)
    wanted = np.arange(ROWS) == 5  # one row that wants them is enough
    got = jax.device_get(logprobs(logits, tokens, wanted, width=4))
    for row, token in enumerate(tokens):
        logs = np.log(softmax(np.asarray(logits[row], np.float64)))
        np.testing.assert_allclose(got.chosen[row], logs[token], atol=1e-5)
        assert got.rank[row] == 1 + int((logits[row] > logits[row][token]).sum())
        np.testing.assert_allclose(got.top[row], np.sort(logs)[::-1][:4], atol=1e-5)
        np.testing.assert_allclose(got.top[row], logs[got.top_ids[row]], atol=1e-5)
        assert len(set(got.top_ids[row].tolist())) == 4
    nobody = jax.device_get(logprobs(logits, tokens, wanted & False, width=4))
    assert not any(x.any() for x in nobody)


def test_a_width_of_zero_or_past_the_vocabulary() -> None:
    logits, token, yes = np.zeros((1, 3), np.float32), np.zeros(1, np.int32), [True]
    none = logprobs(logits, token, np.array(yes), width=0)
    assert none.top_ids.shape == (1, 0) and none.rank.tolist() == [1]
    wide = logprobs(logits, token, np.array(yes), width=9)
    assert sorted(wide.top_ids[0].tolist()) == [0, 1, 2]


@pytest.mark.parametrize("vocab", [512, 500, 128])
@pytest.mark.parametrize("width", [1, 3, 4])
def test_the_largest_entries_in_order_the_first_of_equals_first(vocab, width):
    rng = np.random.default_rng(vocab + width)
    values = rng.integers(0, 6, (7, vocab)).astype(np.float32)  # full of ties
    values[3] = -np.inf
    values[4, [200 % vocab, 5, vocab - 1]] = 9
    order = np.argsort(-values, axis=1, kind="stable")[:, :width]
    got, ids = jax.jit(sampling.top_k, static_argnums=1)(values, width)
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_array_equal(got, np.take_along_axis(values, order, axis=1))
