"""How long prompts and outputs are: inverse distribution functions over tokens.

Owns the length distributions. One uniform makes one length, so requests stay paired
when a distribution's parameters change, and a longer workload begins with a shorter
one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from jaxserve.workloads import checks

Lengths = Callable[[np.ndarray], np.ndarray]
"""f64[n] uniforms in [0, 1) to i64[n] tokens, each at least 1."""


def constant(tokens: int) -> Lengths:
    """Always the same."""
    value = checks.count("tokens", tokens, 1, "a request has at least one token")
    return lambda u: np.full(u.shape, value, np.int64)


def uniform(low: int, high: int) -> Lengths:
    """Each of low, low + 1, ..., high alike."""
    low = checks.count("low", low, 1, "a request has at least one token")
    span = checks.count("high", high, low, "give the larger bound second") - low + 1
    return lambda u: low + np.minimum(np.floor(u * span), span - 1).astype(np.int64)


def geometric(mean: float, cap: int) -> Lengths:
    """Each token is the last with chance 1 / mean; above `cap` set to `cap`."""
    mean = checks.above("mean", mean, 1, "use constant(1) for outputs of one token")
    log_goes_on = math.log1p(-1 / mean)
    return _capped(lambda u: np.ceil(np.log1p(-u) / log_goes_on), cap)


def lognormal(median: float, sigma: float, cap: int) -> Lengths:
    """exp of a normal, rounded; above `cap` set to `cap`, which is part of its mean."""
    centre = math.log(checks.above("median", median, 0, "give it in tokens"))
    sigma = checks.above("sigma", sigma, 0, "use constant for no variation")
    inverse = statistics.NormalDist(centre, sigma).inv_cdf
    return _capped(
        lambda u: np.rint(np.exp([inverse(p) for p in u.tolist()], dtype=float)), cap
    )


def from_quantiles(percentiles: Sequence[float], values: Sequence[float]) -> Lengths:
    """Linear between the given quantiles, rounded.

    Args:
      percentiles: ascending, from 0 to 100.
      values: tokens at each, never falling.
    """
    p, v = np.asarray(percentiles, float), np.asarray(values, float)
    if p.shape != v.shape or p.ndim != 1 or p.size < 2:
        raise ValueError(
            f"values of shape {v.shape} must be one number for each of the "
            f"percentiles, of shape {p.shape}, at least two; add the missing ones"
        )
    if p[0] != 0 or p[-1] != 100 or not (np.diff(p) > 0).all():
        raise ValueError(
            f"percentiles={p.tolist()} must ascend from 0 to 100; add the least and "
            "the greatest value"
        )
    if v[0] < 1 or not (np.diff(v) >= 0).all():
        raise ValueError(
            f"values={v.tolist()} must never fall and begin at 1 or more; order them "
            "as the percentiles are"
        )
    return lambda u: np.rint(np.interp(u * 100, p, v)).astype(np.int64)


def _capped(inverse: Lengths, cap: int) -> Lengths:
    cap = checks.count("cap", cap, 1, "a request has at least one token")
    # The ends of [0, 1] have no image under a distribution without bounds.
    return lambda u: np.clip(
        inverse(np.clip(u, 2.0**-54, 1 - 2.0**-53)), 1, cap
    ).astype(np.int64)
