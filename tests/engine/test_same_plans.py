"""One scheduler, two executors (docs/design.md, contract 2).

In logical time the JAX and the simulated executor get the same plans and return the
same tokens, and the events, times included, are equal.
"""

import dataclasses

import numpy as np
import pytest

from jaxserve import EngineConfig
from jaxserve.executors.cost_model import LinearCost
from tests import serving
from tests.engine.test_invariance import BASE, EOS

COST = LinearCost(fixed_s=0.01, token_s=0.001, context_token_s=0.00003)


TIGHT_OR_NOT = [
    (13, "recompute"),
    (13, "swap"),
    (13, "disk"),
    (13, "auto"),
    (64, "recompute"),
]


def comparable(events: list) -> list:
    """Events without what is measured of this machine: host_s and compiles."""
    return [
        (e.kind, e.time_s, e.request_id, {**e.data, "host_s": 0.0, "compiles": 0})
        for e in events
    ]


def check_alike(real: serving.Run, simulated: serving.Run) -> None:
    """Equal plans, outputs and events on both executors."""
    assert serving.same_plans(real.recorder.plans, simulated.recorder.plans)
    assert real.recorder.moves == simulated.recorder.moves
    pairs = zip(real.recorder.outputs, simulated.recorder.outputs, strict=True)
    for one, two in pairs:
        assert np.array_equal(one.tokens, two.tokens)
        assert np.array_equal(one.ran, two.ran)
        assert np.array_equal(one.done, two.done)
        assert one.num_free == two.num_free
    assert comparable(real.events) == comparable(simulated.events)


def compare(jobs: list, config: EngineConfig) -> tuple:
    """Drive both executors; the runs, after checking that they do not differ."""
    real = serving.drive(jobs, config, eos=EOS, cost=COST)
    simulated = serving.drive(jobs, config, eos=EOS, cost=COST, simulate=True)
    check_alike(real, simulated)
    return real, simulated


@pytest.mark.parametrize("launches_in_flight", [1, 2, 3])
@pytest.mark.parametrize("num_scheduler_steps", [1, 4])
@pytest.mark.parametrize(("num_blocks", "mode"), TIGHT_OR_NOT)
def test_both_executors_get_the_same_plans(
    launches_in_flight: int, num_scheduler_steps: int, num_blocks: int, mode: str
) -> None:
    config = dataclasses.replace(
        BASE,
        preemption_mode=mode,
        launches_in_flight=launches_in_flight,
        num_scheduler_steps=num_scheduler_steps,
        num_blocks=num_blocks,
    )
    preemptions, kept, restored = 0, 0, 0
    for seed in range(3):
        jobs = serving.workload(seed, 25, aborts=seed == 2, fields=True)
        real, _ = compare(jobs, config)
        preemptions += int(real.engine.stats()["preemptions"])
        stats = real.engine.stats()
        kept += int(stats["preemptions_by_swap"] + stats["preemptions_by_disk"])
        restored += int(stats["restored_blocks"])
        real.engine.close()
    assert (preemptions > 0) == (num_blocks == 13)
    assert kept > 0 or mode in ("recompute", "auto")
    assert restored > 0 or num_blocks > 13  # to requests, or from the cache


def test_a_replayed_run_is_the_same_run() -> None:
    config = dataclasses.replace(BASE, num_blocks=13, launches_in_flight=2)
    jobs = serving.workload(5, 25)
    first, second = (serving.drive(jobs, config, eos=EOS, cost=COST) for _ in "ab")
    assert serving.same_plans(first.recorder.plans, second.recorder.plans)
    assert comparable(first.events) == comparable(second.events)
