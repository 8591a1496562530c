"""Counting blocks without seeing them: the formula, and what would come free."""

from __future__ import annotations

import copy
import random

import pytest

from jaxserve.block_count import BlockCount
from jaxserve.moves import Label
from jaxserve.scheduling.budget import Budget
from jaxserve.scheduling.payloads import Payloads
from jaxserve.scheduling.plan_builder import PlanBuilder
from jaxserve.scheduling.prefix_index import PrefixIndex
from jaxserve.scheduling.swap_space import SwapSpace
from jaxserve.scheduling.tiers import Tiers
from tests import serving
from tests.engine.harness import JAX, Served, by_priority, random_config

SHAPE = JAX.shape(10)  # blocks of 4


def test_the_formula_by_hand() -> None:
    count = BlockCount(SHAPE)
    assert count.free == 10
    count.resize(0, 9)  # 3 blocks, 2 of them full
    count.resize(1, 4)
    assert count.free == 6 and count.private(0) == 3
    count.name(0)
    count.name(0)  # a name takes no block
    assert count.free == 6 and count.private(0) == 1 and count.live == 2
    count.adopt(2, 2)  # slot 2 shares both
    assert count.free == 6 and count.private(2) == 0 and count.length[2] == 8
    count.resize(2, 9)
    assert count.free == 5
    assert count.equation() == (
        "free = P - slots - handles = 10 - "
        "((ceil(9/4) - 2) + (ceil(4/4) - 0) + (ceil(9/4) - 2)) - 2 = 5"
    )
    count.release(0)  # the named ones live on
    assert count.free == 6 and count.live == 2
    count.release(2)
    count.retire(2)
    assert count.free == 9
    count.release(1)
    assert count.free == 10 and count.equation().endswith("10 - (0) - 0 = 10")


def test_room_is_made_by_evicting_no_more_than_needed() -> None:
    index = PrefixIndex(SHAPE.num_handles)
    budget = Budget(SHAPE, index, SwapSpace(Tiers(Payloads(0))))
    handles = [index.publish(Label(bytes([i]), b"root"), fresh=False) for i in range(6)]
    budget.count.resize(0, 24)
    for _ in handles:
        budget.count.name(0)
    budget.count.release(0)
    index.unpin(handles[2:])  # type: ignore[arg-type]  # two stay pinned
    assert budget.count.free == 4 and budget.possible() == 8
    plan = PlanBuilder(SHAPE, 16)
    assert budget.extend(plan, 1, 16) == 16 and not plan.retire  # four are free
    assert budget.extend(plan, 1, 21) == 21 and len(plan.retire) == 2
    budget.count.resize(1, 21)
    assert budget.extend(plan, 1, 24) == 24 and len(plan.retire) == 2  # in its block
    assert budget.extend(plan, 1, 99) == 32 and budget.possible() == 2
    assert len(plan.retire) == 4 and index.evictable == 0
    budget.count.resize(1, 32)
    assert budget.count.free == budget.possible() == 0
    assert budget.extend(plan, 2, 5) == 0


def test_no_plan_evicts_more_than_it_can_hold() -> None:
    index = PrefixIndex(SHAPE.num_handles)
    budget = Budget(SHAPE, index, SwapSpace(Tiers(Payloads(0))))
    handles = [
        index.publish(Label(bytes([i]), b"root"), fresh=False) for i in range(10)
    ]
    budget.count.resize(0, 40)
    for _ in handles:
        budget.count.name(0)
    budget.count.release(0)
    index.unpin(handles)  # type: ignore[arg-type]
    plan = PlanBuilder(SHAPE, 16)
    plan.retire = [0] * (SHAPE.max_edits - 3)
    assert budget.extend(plan, 1, 40) == 12
    assert len(plan.retire) == SHAPE.max_edits and not plan.can_retire


@pytest.mark.parametrize("seed", range(10))
def test_what_a_release_would_give_is_what_it_gives(seed: int) -> None:
    """At every step of a run, for random sets of running requests: `after_release`
    says what `possible` is once they are released, whoever shares what."""
    rng = random.Random(seed)
    config = random_config(rng, enable_prefix_caching=seed % 5 > 0)
    served = Served(config, policy=by_priority())
    jobs = serving.workload(seed, 16, spread_s=0.2)
    jobs += rng.choices(jobs[:3], k=8)  # the same prompts at the same time
    for i, job in enumerate(jobs):
        served.submit(f"{i}", job.prompt, job.params, arrival_time=job.arrival_s)
    tried = 0
    while served.engine.has_unfinished_requests():
        served.step()
        # Private: no other place holds columns, names and counts together.
        now = served.engine._scheduler._residents
        if not now.running or rng.random() < 0.5:
            continue
        trial = copy.deepcopy(now)
        victims = rng.sample(sorted(trial.running), rng.randint(1, len(trial.running)))
        releases = [(trial.running[i].slot, trial.running[i].handles) for i in victims]
        expected = trial.budget.after_release(releases)
        assert trial.budget.after_release([]) == trial.budget.possible()
        plan = PlanBuilder(served.engine.shape, config.max_num_batched_tokens)
        for i in victims:
            trial.release(plan, trial.running[i])
        assert trial.budget.possible() == expected
        tried += 1
    assert tried > 5
