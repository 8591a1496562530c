"""`simulate`: times by hand, the same with and without jumps, and what it refuses."""

from __future__ import annotations

import pytest

from jaxserve import EngineConfig, simulate
from jaxserve.executors.cost_model import LinearCost
from jaxserve.scheduling.policies import fcfs, mlfq
from jaxserve.workloads import Chain, Job, make_workload

COST = LinearCost(fixed_s=0.010, token_s=0.001)
CONFIG = EngineConfig(
    max_model_len=512,
    max_num_seqs=2,
    max_num_batched_tokens=64,
    num_blocks=256,
    enable_prefix_caching=False,
)


def test_two_jobs_by_hand() -> None:
    """At 0: a prompt of 20, 30 ms, and its first token. b arrived at 5 ms: its prompt
    of 4 beside a's decode, 15 ms, until 45 ms; then both decode, 12 ms, until a's third
    token at 57 ms ends it, and b's last one alone is 11 ms more."""
    jobs = (Job(0.0, 20, 3), Job(0.005, 4, 3))
    a, b = simulate(jobs, CONFIG, fcfs(), COST).requests
    assert a.token_times_s == pytest.approx((0.030, 0.045, 0.057))
    assert b.token_times_s == pytest.approx((0.045, 0.057, 0.068))
    assert a.finish_reason == b.finish_reason == "stop"
    assert b.admission_delay_s == pytest.approx(0.025)
    assert b.queue_s == pytest.approx(0.025)


@pytest.mark.parametrize("policy", [fcfs, mlfq])
def test_jumps_change_nothing_and_results_are_in_the_jobs_order(policy) -> None:
    jobs = make_workload("W3", n=40, seed=1, rate=20.0)
    config = EngineConfig(
        max_model_len=8192,
        max_num_seqs=8,
        num_blocks=4096,
        enable_prefix_caching=False,
    )
    ended: list[int] = []
    jumped = simulate(jobs, config, policy(), COST, progress=ended.append)
    planned = simulate(jobs, config, policy(), COST, jump=False)
    assert jumped.requests == planned.requests and sum(ended) == 40
    lengths = [r.output_tokens for r in jumped.requests]
    assert lengths == [job.output_tokens for job in jobs]
    arrivals = [r.arrival_s for r in jumped.requests]
    assert arrivals == [job.arrival_s for job in jobs]


def test_jobs_share_what_their_chains_share() -> None:
    chain = Chain((7, 8, 9), 16)
    jobs = tuple(Job(0.1 * i, 50, 2, chain=chain) for i in range(3))
    config = EngineConfig(max_model_len=512, max_num_seqs=2, num_blocks=64)
    requests = simulate(jobs, config, fcfs(), COST).requests
    assert [r.cached_tokens for r in requests] == [0, 48, 48]


def test_what_does_not_fit_is_refused_before_anything_runs() -> None:
    with pytest.raises(ValueError, match="the prompt has 600 tokens.*max_model_len"):
        simulate((Job(0.0, 600, 1),), CONFIG, fcfs(), COST)
    with pytest.raises(ValueError, match="num_blocks=None must be a number"):
        simulate((Job(0.0, 6, 1),), EngineConfig(), fcfs(), COST)
