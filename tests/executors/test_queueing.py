"""One slot is a queue with one server: mean waits against the formulas of M/G/1.

Poisson arrivals at rate r, independent service times S, load rho = r E[S], and
W0 = r E[S^2] / 2, the work that an arrival finds in service. A job is a prompt of one
token and n outputs of 10 ms, so S is n steps.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxserve import EngineConfig
from jaxserve.executors.cost_model import LinearCost
from jaxserve.scheduling.policies import get_policy
from jaxserve.simulation import simulate
from jaxserve.workloads import Job, arrivals, lengths

STEP_S = 0.010
BATCHES = 40  # whose means are nearly independent, and nearly normal
CONFIG = EngineConfig(
    max_num_seqs=1,
    max_model_len=2048,
    num_blocks=128,
    enable_prefix_caching=False,
)

Chances = dict[int, float]
"""Chance of each service time, in steps."""

# 9 short for each long one: E[S^2] is 4.3 times that of equal service times.
MIX: Chances = {8: 0.9, 200: 0.1}
# Each step is the last with chance 1/50. What is left out, above 1500, is 1e-13 of it.
GEOMETRIC: Chances = {n: 0.02 * 0.98 ** (n - 1) for n in range(1, 1501)}
SERVICES = {"mix": MIX, "geometric": GEOMETRIC}


def moment(chances: Chances, k: int) -> float:
    """E[S^k] in seconds^k."""
    return sum(p * (n * STEP_S) ** k for n, p in chances.items())


def pollaczek_khinchine(chances: Chances, rate: float) -> float:
    """Mean wait under FCFS: W0 / (1 - rho)."""
    rho = rate * moment(chances, 1)
    return rate * moment(chances, 2) / 2 / (1 - rho)


def phipps(chances: Chances, rate: float) -> float:
    """Mean wait under shortest first without preemption (Phipps 1956).

    A job of n steps waits W0 / ((1 - load of shorter) (1 - load of those not longer)),
    since equals are served in order of arrival (Cobham 1954, a class a length).
    """
    w0 = rate * moment(chances, 2) / 2
    shorter = wait = 0.0
    for n, p in sorted(chances.items()):
        not_longer = shorter + rate * p * n * STEP_S
        wait += p * w0 / ((1 - shorter) * (1 - not_longer))
        shorter = not_longer
    return wait


def steps(chances: Chances, u: np.ndarray) -> np.ndarray:
    """i64[n] service times of the uniforms u."""
    values = np.array(sorted(chances))
    bounds = np.cumsum([chances[n] for n in values.tolist()])
    return values[np.minimum(np.searchsorted(bounds, u, "right"), len(values) - 1)]


def waits_s(spec: str, chances: Chances, rho: float, n: int, seed: int) -> np.ndarray:
    """f64[n] waits for the slot, in order of arrival."""
    rng = np.random.default_rng(seed)
    rate = rho / moment(chances, 1)
    times = arrivals.poisson(n, rate, rng).tolist()
    outputs = steps(chances, rng.random(n)).tolist()
    jobs = tuple(Job(t, 1, k) for t, k in zip(times, outputs, strict=True))
    policy = get_policy(spec, truth=dict(enumerate(outputs)))
    done = simulate(jobs, CONFIG, policy, LinearCost(STEP_S, token_s=0.0))
    # Busy for the service times and nothing else.
    assert done.stats["steps"] == sum(outputs)
    return np.array([r.queue_s for r in done.requests])


def check(spec: str, service: str, rho: float, n: int) -> None:
    """The mean is within 3 standard errors, by batch means, of the formula."""
    chances = SERVICES[service]
    formula = {"fcfs": pollaczek_khinchine, "sjf:oracle": phipps}[spec]
    expected = formula(chances, rho / moment(chances, 1))
    found = waits_s(spec, chances, rho, n, seed=0)
    means = found.reshape(BATCHES, -1).mean(axis=1)
    error = means.std(ddof=1) / math.sqrt(BATCHES)
    assert error < 0.1 * expected, "too few jobs to tell"
    assert abs(found.mean() - expected) < 3 * error


def test_the_formulas_by_hand() -> None:
    # All of 50 steps at half load: 1 a second, W0 = 1/8 s, twice that under FCFS. Of
    # equals none is shorter.
    equal = {50: 1.0}
    assert pollaczek_khinchine(equal, 1.0) == pytest.approx(0.25)
    assert phipps(equal, 1.0) == pytest.approx(0.25)
    # E[S] = 0.9 * 0.08 + 0.1 * 2 = 0.272, E[S^2] = 0.9 * 0.0064 + 0.4 = 0.40576. At
    # 2 a second W0 = 0.40576 and rho = 0.544, of which 0.144 is short.
    assert pollaczek_khinchine(MIX, 2.0) == pytest.approx(0.40576 / 0.456)
    assert phipps(MIX, 2.0) == pytest.approx(
        0.9 * 0.40576 / 0.856 + 0.1 * 0.40576 / (0.856 * 0.456)
    )
    # Geometric of mean m: E[S^2] = (2 m^2 - m) steps^2.
    assert moment(GEOMETRIC, 1) == pytest.approx(0.50)
    assert moment(GEOMETRIC, 2) == pytest.approx(4950 * STEP_S**2)


def test_service_times_have_their_chances() -> None:
    u = (np.arange(100_000) + 0.5) / 100_000
    assert np.bincount(steps(MIX, u))[[8, 200]].tolist() == [90_000, 10_000]
    drawn = steps(GEOMETRIC, u)
    assert drawn.mean() == pytest.approx(50, rel=1e-3)
    assert drawn.tolist() == lengths.geometric(50, 1500)(u).tolist()


@pytest.mark.parametrize("spec", ["fcfs", "sjf:oracle"])
def test_one_slot_waits_as_the_formula_says(spec: str) -> None:
    check(spec, "mix", rho=0.5, n=8_000)


@pytest.mark.slow
@pytest.mark.parametrize(("service", "rho"), [("mix", 0.3), ("geometric", 0.6)])
@pytest.mark.parametrize("spec", ["fcfs", "sjf:oracle"])
def test_50_000_jobs_wait_as_the_formula_says(spec, service, rho) -> None:
    check(spec, service, rho, n=50_000)
