"""Which tokens top_k, top_p and min_p leave, against sorting in numpy."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxserve.device import sampling
from tests.device.row_params import ROWS, VOCAB, rows, softmax

truncate = jax.jit(sampling.truncate)


def allowed(
    logits: np.ndarray, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """Which ids of one row stay, by sorting; ties with the last one kept stay too."""
    logits = np.asarray(logits, np.float64)
    keep = np.ones(len(logits), bool)
    if 0 < top_k < len(logits):
        keep = logits >= np.sort(logits)[-top_k]
    probs = softmax(np.where(keep, logits, -np.inf))
    if top_p < 1:
        descending = np.sort(probs)[::-1]
        # The smallest head of the sorted list that reaches top_p, never empty.
        count = 1 + int((np.cumsum(descending)[:-1] < top_p).sum())
        keep &= probs >= descending[count - 1]
    if min_p > 0:
        keep &= probs >= min_p * probs.max()
    return keep


def kept(logits: np.ndarray, **fields: object) -> np.ndarray:
    """bool[ROWS, VOCAB] that `truncate` left; what is left keeps its logit."""
    out = np.asarray(truncate(logits, rows(ROWS, **fields)))
    left = out > -np.inf
    np.testing.assert_array_equal(out[left], logits[left])
    return left


def _on_the_edge(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> bool:
    """Whether rounding to float32 may decide: a share within 1e-5 of a bound."""
    probs = softmax(
        np.where(allowed(logits, top_k), np.asarray(logits, np.float64), -np.inf)
    )
    heads = np.cumsum(np.sort(probs)[::-1])
    near_p = top_p < 1 and (abs(heads - top_p) < 1e-5).any()
    near_min = 0 < min_p < 1 and (abs(probs / probs.max() - min_p) < 1e-5).any()
    return bool(near_p or near_min)


@pytest.mark.parametrize("seed", range(4))
def test_the_allowed_set_is_that_of_a_sort(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(40):
        logits = rng.normal(size=(ROWS, VOCAB)) * rng.choice([0.1, 1, 8])
        if rng.random() < 0.5:  # ties, of both signs
            logits = np.round(logits * 2) / 2
        logits[rng.random(logits.shape) < rng.choice([0, 0.3])] = -np.inf
        logits[:, 0] = rng.normal(size=ROWS)
        logits = logits.astype(np.float32)
        top_k = rng.choice([0, -1, 1, 2, 5, VOCAB, VOCAB + 1, 1000], ROWS)
        top_p = rng.choice([0.0, 0.3, 0.777, 0.95, 1.0], ROWS)
        min_p = rng.choice([0.0, 0.0, 0.05, 0.5, 1.0], ROWS)
        got = kept(logits, top_k=top_k, top_p=top_p, min_p=min_p)
        for row in range(ROWS):
            arguments = (int(top_k[row]), float(top_p[row]), float(min_p[row]))
            expected = allowed(logits[row], *arguments)
            expected &= logits[row] > -np.inf
            if not _on_the_edge(logits[row], *arguments):
                assert got[row].tolist() == expected.tolist(), arguments


def test_ties_with_the_last_kept_token_stay() -> None:
    logits = np.full((ROWS, VOCAB), -4, np.float32)
    logits[:, [3, 7, 9]] = 2
    logits[:, 5] = 3
    best = set(np.flatnonzero(kept(logits, top_k=2)[0]))
    assert best == {3, 5, 7, 9}
    # p(5) = .4693, p of each tie .1726: .5 needs one of the three, and so has them all.
    assert set(np.flatnonzero(kept(logits, top_p=0.5)[0])) == {3, 5, 7, 9}
    assert set(np.flatnonzero(kept(logits, top_k=1)[0])) == {5}
    assert set(np.flatnonzero(kept(logits, top_p=0.0)[0])) == {5}
    even = np.zeros((ROWS, VOCAB), np.float32)
    assert kept(even, top_k=1, top_p=0.0, min_p=1.0).all()
    zeros = np.where(np.arange(VOCAB) < 2, np.float32(0), np.float32(-1))
    zeros[1] = -0.0  # equal to 0.0, though its bits are not
    signed = np.tile(zeros, (ROWS, 1)).astype(np.float32)
    assert set(np.flatnonzero(kept(signed, top_k=1)[0])) == {0, 1}


def test_one_token_is_enough_of_an_extreme_distribution() -> None:
    logits = np.full((ROWS, VOCAB), -np.inf, np.float32)
    logits[:, 4] = -3e38
    for fields in ({"top_k": 3}, {"top_p": 0.5}, {"top_p": 0.0}, {"min_p": 0.5}):
        assert np.flatnonzero(kept(logits, **fields)[0]).tolist() == [4]
