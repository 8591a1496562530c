"""Length distributions: images of chosen uniforms, and moments against closed forms."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from jaxserve.workloads import lengths

N = 100_000
GRID = (np.arange(N) + 0.5) / N
"""Midpoints: the mean over them of a rising function is its integral within
(largest - least) / 2N, so the moments below carry no sampling error."""

PHI = statistics.NormalDist().cdf


def at(distribution: lengths.Lengths, *u: float) -> list[int]:
    return distribution(np.array(u)).tolist()


def test_constant() -> None:
    assert at(lengths.constant(7), 0.0, 0.5, 0.999) == [7, 7, 7]


def test_uniform_gives_each_value_the_same_share() -> None:
    assert at(lengths.uniform(3, 5), 0, 0.33, 0.34, 0.66, 0.67, 1 - 2**-53) == [
        *(3, 3, 4, 4, 5, 5)
    ]
    assert lengths.uniform(1, 512)(GRID).mean() == pytest.approx(256.5, abs=512 / N)


def test_geometric_halves_with_each_token_at_mean_two() -> None:
    # P(X <= k) = 1 - 2^-k.
    u = (0.0, 0.49, 0.51, 0.74, 0.76, 0.99)
    assert at(lengths.geometric(2, cap=99), *u) == [1, 1, 2, 2, 3, 7]
    assert at(lengths.geometric(2, cap=2), *u) == [1, 1, 2, 2, 2, 2]


@pytest.mark.parametrize(("mean", "cap"), [(1.5, 50), (50, 100_000), (340, 2048)])
def test_geometric_has_the_mean_of_a_capped_geometric(mean: float, cap: int) -> None:
    found = lengths.geometric(mean, cap)(GRID)
    # E min(X, c) = sum of P(X > k) over k < c.
    expected = mean * (1 - (1 - 1 / mean) ** cap)
    assert found.mean() == pytest.approx(expected, abs=found.max() / N)
    assert found.min() == 1


def test_lognormal_at_whole_deviations() -> None:
    # 100 / e = 36.79, 100 e = 271.83, 100 e^2 = 738.91
    u = (PHI(-1), 0.5, PHI(1), PHI(2))
    assert at(lengths.lognormal(100, 1.0, cap=9999), *u) == [37, 100, 272, 739]
    assert at(lengths.lognormal(100, 1.0, cap=200), *u) == [37, 100, 200, 200]
    assert at(lengths.lognormal(1, 3.0, cap=10), 0.0, 1.0) == [1, 10]


@pytest.mark.parametrize(
    ("median", "sigma", "cap"), [(180, 1.14, 4096), (70, 1.2, 2048)]
)
def test_lognormal_has_the_moments_of_a_capped_lognormal(
    median: float, sigma: float, cap: int
) -> None:
    found = lengths.lognormal(median, sigma, cap)(GRID).astype(float)
    z = math.log(cap / median) / sigma

    def moment(k: int) -> float:
        body = median**k * math.exp((k * sigma) ** 2 / 2) * PHI(z - k * sigma)
        return body + cap**k * (1 - PHI(z))

    # Rounding moves a length by at most half a token, and its square by the length.
    assert found.mean() == pytest.approx(moment(1), abs=0.5 + cap / N)
    second = (found**2).mean()
    assert second == pytest.approx(moment(2), abs=moment(1) + 0.25 + cap**2 / N)


def test_the_heavy_tail_of_the_sweep_is_heavy() -> None:
    found = lengths.lognormal(180, 1.14, 4096)(GRID)
    assert found.var() / found.mean() ** 2 == pytest.approx(2.0, abs=0.05)


def test_quantiles_are_met_and_joined_by_lines() -> None:
    table = lengths.from_quantiles((0, 50, 100), (1, 11, 111))
    assert at(table, 0.0, 0.25, 0.5, 0.75, 1.0) == [1, 6, 11, 61, 111]
    # A line's mean is that of its ends: (6 + 61) / 2.
    assert table(GRID).mean() == pytest.approx(33.5, abs=0.01)


def test_one_uniform_makes_one_length() -> None:
    u = np.random.Generator(np.random.PCG64(3)).random(100)
    for distribution in (
        lengths.lognormal(50, 1.0, 999),
        lengths.geometric(50, 999),
        lengths.uniform(1, 99),
        lengths.from_quantiles((0, 100), (1, 9)),
    ):
        whole = distribution(u)
        assert whole.dtype == np.int64
        assert (distribution(u[:40]) == whole[:40]).all()
        assert (np.diff(distribution(np.sort(u))) >= 0).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lengths.constant(0), "tokens=0 must"),
        (lambda: lengths.uniform(5, 4), "high=4 must"),
        (lambda: lengths.uniform(0, 4), "low=0 must"),
        (lambda: lengths.geometric(1, 9), "mean=1 must"),
        (lambda: lengths.geometric(5, 0), "cap=0 must"),
        (lambda: lengths.lognormal(0, 1, 9), "median=0 must"),
        (lambda: lengths.lognormal(9, 0, 9), "sigma=0 must"),
        (lambda: lengths.from_quantiles((0, 100), (1,)), r"values of shape \(1,\) "),
        (lambda: lengths.from_quantiles((1, 100), (1, 2)), "percentiles="),
        (lambda: lengths.from_quantiles((0, 50, 50), (1, 2, 3)), "percentiles="),
        (lambda: lengths.from_quantiles((0, 50, 100), (1, 3, 2)), "values="),
        (lambda: lengths.from_quantiles((0, 100), (0, 2)), "values="),
    ],
)
def test_what_is_refused_is_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}.*; "):
        call()
