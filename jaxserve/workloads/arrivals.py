"""When requests come: f64[n] arrival times in seconds, in ascending order.

Owns the arrival processes. Each draws the same numbers whatever the rate, so that times
at twice the rate are exactly half of it and a sweep over loads compares like with like.
"""

from __future__ import annotations

import numpy as np

from jaxserve.workloads import checks

_RATE = "give requests per second, or use all_at_once"


def all_at_once(n: int) -> np.ndarray:
    """Everything at time 0."""
    return np.zeros(checks.count("n", n, 1, "ask for at least one request"))


def poisson(n: int, rate_rps: float, rng: np.random.Generator) -> np.ndarray:
    """Independent exponential gaps: arrivals without memory, gaps of CV 1."""
    rate = checks.above("rate_rps", rate_rps, 0, _RATE)
    checks.count("n", n, 1, "ask for at least one request")
    return rng.standard_exponential(n).cumsum() / rate


def gamma(n: int, rate_rps: float, cv: float, rng: np.random.Generator) -> np.ndarray:
    """Gamma gaps of mean 1 / rate and coefficient of variation `cv`: bursty above 1.

    The arrival model of BurstGPT (Wang et al., KDD 2025).
    """
    rate = checks.above("rate_rps", rate_rps, 0, _RATE)
    cv2 = checks.above("cv", cv, 0, "use even for gaps without variation") ** 2
    checks.count("n", n, 1, "ask for at least one request")
    return rng.standard_gamma(1 / cv2, n).cumsum() * cv2 / rate


def even(n: int, rate_rps: float, rng: np.random.Generator) -> np.ndarray:
    """Equal gaps; the first request comes at a random point of the first gap."""
    rate = checks.above("rate_rps", rate_rps, 0, _RATE)
    checks.count("n", n, 1, "ask for at least one request")
    return (np.arange(n) + rng.random()) / rate


def bursts(
    n: int, rate_rps: float, rng: np.random.Generator, *, on_s: float, off_s: float
) -> np.ndarray:
    """Poisson for `on_s` seconds, silence for `off_s`, and so on.

    Args:
      rate_rps: mean over on and off together. The periods keep their length whatever
        the rate; it is the time spent in "on" that scales.
    """
    on = checks.above("on_s", on_s, 0, "a burst needs a length in seconds")
    off = checks.above("off_s", off_s, 0, "without a pause use poisson")
    rate = checks.above("rate_rps", rate_rps, 0, _RATE)
    busy = poisson(n, rate * (on + off) / on, rng)
    return busy + np.floor(busy / on) * off


def scale(arrivals_s: np.ndarray, factor: float) -> np.ndarray:
    """The same arrivals at `factor` times the rate."""
    return np.asarray(arrivals_s) / checks.above(
        "factor", factor, 0, "2 doubles the load and 0.5 halves it"
    )
