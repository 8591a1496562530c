"""The answer does not depend on who goes first (docs/design.md, contract 1), nor plans
on who runs them (contract 2): every policy, batching and prefill mode.

The shapes are those of test_invariance, so that nothing more is compiled.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import pytest

from jaxserve import RequestOutput
from jaxserve.executors.sim_executor import Truth
from jaxserve.scheduling.policies import POLICIES, get_policy
from tests import serving
from tests.engine import test_invariance
from tests.engine.test_invariance import BASE, EOS, pairs
from tests.engine.test_same_plans import COST, check_alike

SPECS = (
    "fcfs",
    "hrrn",
    "edf(preempt=True)",
    "priority",
    "priority(aging_s=0.1)",
    "mlfq(quanta=(2, 6), boost_interval_s=0.3)",
    "fair_share",
    "prefix_affinity(skip_limit=2)",
    "prefix_sjf",
    "sjf(oracle)",
    "sjf(prompt_signals)",
    "srpt(oracle(noise=0.5))",
    "srpt(history)",
    "chain(priority, sjf(history))",
    "bounded_wait(srpt(prompt_signals), 2)",
)
MODES = {  # static batching computes all prompts of a batch first: no other mode
    "static": {"batching": "static"},
    "chunked": {"prefill": "chunked"},
    "prefill_first": {"prefill": "prefill_first"},
    "decode_first": {"prefill": "decode_first"},
}
FACTORS = {
    "policy": SPECS,
    "mode": tuple(MODES),
    "num_scheduler_steps": (1, 4),
    "launches_in_flight": (1, 2, 3),
    "num_blocks": (13, 64),  # 13: one request of full length and little else
    "preemption_mode": ("recompute", "swap", "disk", "auto"),
}
PRODUCT, COVER = test_invariance.product(FACTORS), test_invariance.pairwise(FACTORS)


@functools.cache
def workload(seed: int) -> tuple[list[serving.Job], list[list[int]]]:
    """Jobs, a fifth of them aborted under odd seeds; and each one's whole output."""
    jobs = serving.workload(seed, 20, aborts=seed % 2 == 1, kinds=True, fields=True)
    return jobs, [job.expected(EOS) for job in jobs]


def run(combination: dict, seed: int, *, simulate: bool = False) -> serving.Run:
    """Serve a workload with users and deadlines to its end, in logical time."""
    fields = dict(combination)
    spec, mode = fields.pop("policy"), fields.pop("mode")
    jobs, expected = workload(seed)
    truth = {i: Truth(t, t[-1] in EOS) for i, t in enumerate(expected)}
    engine, recorder, events = serving.make_engine(
        dataclasses.replace(BASE, **fields, **MODES[mode]),
        eos=EOS,
        policy=get_policy(spec, truth={i: len(t) for i, t in enumerate(expected)}),
        cost=COST,
        truth=truth if simulate else None,
    )
    for i, job in enumerate(jobs):
        engine.add_request(
            str(i),
            job.prompt,
            job.params,
            arrival_time=job.arrival_s,
            priority=job.priority,
            user=(None, "ann", "ben")[i % 3],
            deadline_s=None if i % 4 == 0 else job.arrival_s + 0.1 * (i % 5),
            cache_salt=job.salt,
            prompt=("answer briefly", "explain in detail")[i % 2],
        )
    outputs: dict[str, RequestOutput] = {}
    for step in itertools.count():
        if not engine.has_unfinished_requests():
            return serving.Run(engine, recorder, outputs, events)
        assert step < 200 * len(jobs), "the engine makes no progress"
        for i, job in enumerate(jobs):
            if job.abort_after == step:
                engine.abort_request(str(i))
        for output in engine.step():
            serving.keep(outputs, jobs, output)
    raise AssertionError("not reached")


def check(combination: dict, seeds: Sequence[int]) -> None:
    """Every output is the direct computation's, and nothing is left behind."""
    preemptions = sum(check_run(combination, seed) for seed in seeds)
    if combination["mode"] == "static":
        assert preemptions == 0
    elif combination["num_blocks"] == 13:
        assert preemptions > 0, "memory was meant to be tight"


def check_run(combination: dict, seed: int) -> int:
    """One run; how often a request lost its slot."""
    done = run(combination, seed)
    jobs, expected = workload(seed)
    for i, tokens in enumerate(expected):
        completion = done.outputs[str(i)].outputs[0]
        if completion.finish_reason == "abort":
            assert jobs[i].abort_after is not None
            tokens = tokens[: len(completion.token_ids)]
        else:
            why = "stop" if tokens[-1] in EOS else "length"
            assert completion.finish_reason == why
        assert completion.token_ids == tokens, f"request {i} of seed {seed}"
        jobs[i].check_scores(done.outputs[str(i)])
    engine, config = done.engine, done.engine.config
    engine.settle_tiers()
    assert engine.holds_nothing()
    stats = engine.stats()
    assert stats["host_blocks"] == stats["host_cached_blocks"]
    assert stats["free_blocks"] == config.num_blocks - stats["cached_blocks"]
    assert done.recorder.outputs[-1].num_free == stats["free_blocks"]
    engine.reset_prefix_cache()
    cleared = engine.stats()
    assert cleared["free_blocks"] == config.num_blocks
    assert cleared["host_blocks"] == cleared["disk_blocks"] == 0
    engine.close()
    return int(stats["preemptions"])


@pytest.mark.parametrize("combination", COVER, ids=test_invariance.name)
def test_outputs_are_the_direct_computation(combination: dict) -> None:
    check(combination, seeds=(0, 1))


@pytest.mark.fuzz
@pytest.mark.parametrize("combination", PRODUCT, ids=test_invariance.name)
def test_outputs_are_the_direct_computation_everywhere(combination: dict) -> None:
    check(combination, seeds=range(100, 106))


def test_the_cover_is_pairwise_and_has_every_policy_by_name() -> None:
    values = [(f, v) for f, several in FACTORS.items() for v in several]
    met = set().union(*map(pairs, COVER))
    for one, two in itertools.combinations(values, 2):
        assert one[0] == two[0] or {(one, two), (two, one)} & met
    assert {spec.partition("(")[0] for spec in SPECS} == set(POLICIES)


SAME_PLANS = [  # each policy once, in some order of the other switches
    {
        "policy": spec,
        "mode": list(MODES)[(i + 1) % 4],
        "num_scheduler_steps": (1, 4)[i // 2 % 2],
        "launches_in_flight": i % 3 + 1,
        "num_blocks": (13, 64)[i // 3 % 2],
    }
    for i, spec in enumerate(SPECS)
]


@pytest.mark.parametrize("combination", SAME_PLANS, ids=test_invariance.name)
def test_both_executors_get_the_same_plans(combination: dict) -> None:
    real = run(combination, seed=1)
    simulated = run(combination, seed=1, simulate=True)
    check_alike(real, simulated)
