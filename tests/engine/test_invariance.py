"""The answer does not depend on the schedule (docs/design.md, contract 1) and nothing
leaks (contract 3): random requests on the hash model over the switches of the engine.

Every output is compared with the model's definition applied to the prompt directly.
"""

import dataclasses
import itertools

import pytest

from jaxserve import EngineConfig
from tests import serving

BASE = EngineConfig(
    block_size=4,
    max_num_seqs=4,
    max_model_len=48,
    max_num_batched_tokens=16,
    max_logprobs=1,
    num_swap_blocks=12,  # for two requests, if they are short
    num_disk_blocks=30,
)
EOS = (7, 50)

FACTORS = {
    "launches_in_flight": (1, 2, 3),
    "num_scheduler_steps": (1, 4, 8),
    "max_chunk_tokens": (None, 5, 1),
    "num_blocks": (13, 64),  # 13: one request of full length and little else
    "enable_prefix_caching": (True, False),
    "skip_limit": (0, 2),
    "preemption_mode": ("recompute", "swap", "disk", "auto"),
    "tier_write": ("never", "on_eviction", "through"),
}


def product(factors: dict = FACTORS) -> list[dict]:
    """Every combination of the factors."""
    return [
        dict(zip(factors, values, strict=True))
        for values in itertools.product(*factors.values())
    ]


def pairs(combination: dict) -> set:
    """The pairs of factor values that a combination covers."""
    return set(itertools.combinations(sorted(combination.items(), key=str), 2))


def pairwise(factors: dict = FACTORS) -> list[dict]:
    """Few combinations in which every two values of two factors meet (greedy cover)."""
    rest = product(factors)
    uncovered = set().union(*map(pairs, rest))
    chosen = []
    while uncovered:
        best = max(rest, key=lambda c: len(pairs(c) & uncovered))
        chosen.append(best)
        uncovered -= pairs(best)
    return chosen


def name(combination: dict) -> str:
    return "-".join(str(value) for value in combination.values())


def check(combination: dict, seeds: range, requests: int) -> None:
    """Serve random workloads; every output must be the direct computation's."""
    config = dataclasses.replace(BASE, **combination)
    preemptions = 0
    for seed in seeds:
        aborts = seed % 2 == 1
        jobs = serving.workload(seed, requests, aborts=aborts, kinds=True, fields=True)
        run = serving.drive(jobs, config, eos=EOS)
        for i, job in enumerate(jobs):
            completion = run.outputs[str(i)].outputs[0]
            expected = job.expected(EOS)
            if completion.finish_reason == "abort":
                assert job.abort_after is not None
                expected = expected[: len(completion.token_ids)]
            else:
                stopped = expected[-1] in EOS
                assert completion.finish_reason == ("stop" if stopped else "length")
            assert completion.token_ids == expected, f"request {i} of seed {seed}"
            job.check_scores(run.outputs[str(i)])
        stats = run.engine.stats()
        assert run.engine.holds_nothing()
        assert stats["host_blocks"] == stats["host_cached_blocks"]
        assert run.recorder.inner.num_payloads == stats["host_blocks"]
        assert stats["free_blocks"] == config.num_blocks - stats["cached_blocks"]
        assert run.recorder.outputs[-1].num_free == stats["free_blocks"]
        run.engine.reset_prefix_cache()
        cleared = run.engine.stats()
        assert cleared["free_blocks"] == config.num_blocks
        assert cleared["host_blocks"] == cleared["disk_blocks"] == 0
        run.engine.close()
        preemptions += int(stats["preemptions"])
    if config.num_blocks == 13:
        assert preemptions > 0, "memory was meant to be tight"


@pytest.mark.parametrize("combination", pairwise(), ids=name)
def test_outputs_are_the_direct_computation(combination: dict) -> None:
    check(combination, range(8), requests=25)


@pytest.mark.fuzz
@pytest.mark.parametrize("combination", product()[::5], ids=name)
def test_outputs_are_the_direct_computation_everywhere(combination: dict) -> None:
    check(combination, range(100, 112), requests=30)


def test_the_cover_is_pairwise() -> None:
    everything = set().union(*map(pairs, product()))
    assert set().union(*map(pairs, pairwise())) == everything
