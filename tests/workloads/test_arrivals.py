"""Arrival processes against their closed forms.

Bounds are five standard errors of the estimator at the n used, so that a right process
fails about once in two million seeds, and the seed is fixed.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxserve.workloads import arrivals

N = 100_000


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))


def gaps(times: np.ndarray) -> np.ndarray:
    return np.diff(times, prepend=0.0)


@pytest.mark.parametrize("rate", [0.5, 20.0])
def test_poisson_gaps_are_exponential(rate: float) -> None:
    found = np.sort(gaps(arrivals.poisson(N, rate, rng())))
    cdf = -np.expm1(-rate * found)
    # Dvoretzky-Kiefer-Wolfowitz: beyond this with chance 1e-6.
    bound = math.sqrt(math.log(2e6) / (2 * N))
    assert np.abs(cdf - np.arange(1, N + 1) / N).max() < bound


def test_poisson_gaps_have_no_memory() -> None:
    found = gaps(arrivals.poisson(N, 3.0, rng()))
    correlation = np.corrcoef(found[:-1], found[1:])[0, 1]
    assert abs(correlation) < 5 / math.sqrt(N)


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0])
def test_gamma_gaps_have_the_mean_and_the_cv(cv: float) -> None:
    found = gaps(arrivals.gamma(N, 4.0, cv, rng()))
    assert found.mean() == pytest.approx(0.25, abs=5 * 0.25 * cv / math.sqrt(N))
    # Delta method for a gamma of shape 1 / cv^2: var = cv^2 (1 + cv^2) / 2n.
    error = cv * math.sqrt((1 + cv**2) / (2 * N))
    assert found.std() / found.mean() == pytest.approx(cv, abs=5 * error)


def test_even_gaps_are_equal_and_begin_within_the_first() -> None:
    times = arrivals.even(5, 2.0, rng(7))
    np.testing.assert_allclose(np.diff(times), 0.5, rtol=1e-12)
    assert 0 <= times[0] < 0.5
    assert times[0] != arrivals.even(5, 2.0, rng(8))[0]


def test_bursts_keep_to_their_windows_and_their_mean_rate() -> None:
    times = arrivals.bursts(N, 2.0, rng(), on_s=3.0, off_s=7.0)
    assert (np.diff(times) >= 0).all()
    # Up to the rounding of a sum, none falls into a pause.
    assert (times % 10 < 3 + 1e-6).all()
    # N / 2 seconds, give or take the window that the run ends in.
    assert times[-1] == pytest.approx(N / 2, abs=5 * math.sqrt(N) / 2 + 10)
    # Within the windows the rate is 2 * 10 / 3; the k-th of them holds a Poisson count.
    counts = np.bincount((times // 10).astype(int))[:-1]
    assert counts.mean() == pytest.approx(20, abs=5 * math.sqrt(20 / counts.size))
    error = math.sqrt(2 / counts.size)
    assert counts.var() / counts.mean() == pytest.approx(1, abs=5 * error)


def test_all_at_once_is_zero() -> None:
    assert arrivals.all_at_once(3).tolist() == [0.0, 0.0, 0.0]


def test_scale_multiplies_the_rate() -> None:
    times = np.array([1.0, 2.0, 5.0])
    assert arrivals.scale(times, 2).tolist() == [0.5, 1.0, 2.5]


@pytest.mark.parametrize(
    "draw",
    [
        lambda rate, r: arrivals.poisson(50, rate, r),
        lambda rate, r: arrivals.gamma(50, rate, 2.0, r),
        lambda rate, r: arrivals.even(50, rate, r),
    ],
)
def test_the_rate_scales_the_same_draws(draw) -> None:
    # Halving is exact in binary.
    assert (draw(2.0, rng()) * 2 == draw(1.0, rng())).all()
    assert (draw(1.0, rng()) != draw(1.0, rng(1))).any()


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: arrivals.poisson(0, 1.0, rng()), "n=0"),
        (lambda: arrivals.poisson(3, 0.0, rng()), "rate_rps=0.0"),
        (lambda: arrivals.poisson(3, math.nan, rng()), "rate_rps=nan"),
        (lambda: arrivals.poisson(3, math.inf, rng()), "rate_rps=inf"),
        (lambda: arrivals.gamma(3, 1.0, 0, rng()), "cv=0"),
        (lambda: arrivals.even(3, -1, rng()), "rate_rps=-1"),
        (lambda: arrivals.bursts(3, 1.0, rng(), on_s=0, off_s=1), "on_s=0"),
        (lambda: arrivals.bursts(3, 1.0, rng(), on_s=1, off_s=0), "off_s=0"),
        (lambda: arrivals.scale(np.zeros(1), 0), "factor=0"),
        (lambda: arrivals.all_at_once(True), "n=True"),
    ],
)
def test_what_is_refused_is_named(call, field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be .*; "):
        call()
