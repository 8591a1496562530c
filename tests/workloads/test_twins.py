"""Twins reproduce their tables."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxserve.workloads.twins import PERCENTILES, TWINS, make_twin

N = 20_000
TIMED = sorted(name for name, twin in TWINS.items() if twin.rate_rps)


@pytest.mark.parametrize("name", sorted(TWINS))
def test_the_distribution_meets_the_table(name: str) -> None:
    twin, at = TWINS[name], np.array(PERCENTILES) / 100
    assert twin.outputs(at).tolist() == list(twin.output_tokens)
    if twin.input_tokens is not None:
        assert twin.inputs(at).tolist() == list(twin.input_tokens)


@pytest.mark.parametrize("name", TIMED)
def test_a_workload_has_the_quantiles_the_rate_and_the_cv(name: str) -> None:
    twin, jobs = TWINS[name], make_twin(name, n=N, seed=0)
    # Dvoretzky-Kiefer-Wolfowitz: the sample's distribution is nowhere farther from the
    # true one, save with chance 1e-6.
    bound = math.sqrt(math.log(2e6) / (2 * N))
    for table, tokens in (
        (twin.input_tokens, [job.prompt_tokens for job in jobs]),
        (twin.output_tokens, [job.output_tokens for job in jobs]),
    ):
        assert table is not None
        for percentile, value in zip(PERCENTILES, table, strict=True):
            assert np.mean(np.array(tokens) < value) <= percentile / 100 + bound
            assert np.mean(np.array(tokens) <= value) >= percentile / 100 - bound
    cv, rate = twin.gap_cv or 1.0, twin.rate_rps
    assert rate is not None
    gaps = np.diff([job.arrival_s for job in jobs])
    error = cv / math.sqrt(N) / rate
    assert gaps.mean() == pytest.approx(1 / rate, abs=5 * error)
    # Delta method for a gamma of shape 1 / cv^2: var = cv^2 (1 + cv^2) / 2n.
    error = cv * math.sqrt((1 + cv**2) / (2 * N))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, abs=5 * error)


def test_prompts_and_outputs_are_independent() -> None:
    jobs = make_twin("azure23_conv", n=N, seed=0)
    lengths = np.array([(job.prompt_tokens, job.output_tokens) for job in jobs])
    assert abs(np.corrcoef(lengths.T)[0, 1]) < 5 / math.sqrt(N)


def test_the_rate_moves_times_alone() -> None:
    own, fast = (make_twin("vtc_arena", n=50, seed=1, rate=r) for r in (None, 5.0))
    assert [job._replace(arrival_s=0) for job in own] == [
        job._replace(arrival_s=0) for job in fast
    ]
    # Twice its own 2.5 per second.
    assert [job.arrival_s / 2 for job in own] == [job.arrival_s for job in fast]


@pytest.mark.parametrize(
    ("name", "rate", "message"),
    [
        ("azure", None, r"^twin 'azure' must be one of \['arxiv', 'azure23_code', "),
        ("arxiv", None, "^rate=None must .* arxiv has no times"),
        ("lmsys", 1.0, "^input_tokens=None: .*draw prompts"),
    ],
)
def test_what_a_trace_does_not_know_is_refused(
    name: str, rate: float | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_twin(name, n=3, seed=0, rate=rate)
