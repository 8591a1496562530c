"""Who gets in, who is passed, who gives way: on the definition."""

from __future__ import annotations

import random

import pytest

from jaxserve.scheduling.policies import fcfs
from tests import serving
from tests.engine.harness import (
    SCHEDULES,
    Served,
    by_priority,
    config,
    equals,
    order,
    serve,
)
from tests.serving import direct


@pytest.mark.parametrize("limit", [0, 1, 3])
@pytest.mark.parametrize(("launches", "steps"), SCHEDULES)
def test_a_head_that_does_not_fit_is_passed_at_most_so_often(
    launches: int, steps: int, limit: int
) -> None:
    served = Served(
        config(
            4,
            launches,
            steps,
            num_blocks=10,
            max_num_seqs=8,
            max_chunk_tokens=8,
            skip_limit=limit,
            enable_prefix_caching=False,
        )
    )
    served.add("runs", [1] * 20, 13)  # 8 blocks at its end
    served.step()
    served.add("head", [2] * 24, 2)  # 6 or 7 blocks: not before it has ended
    for i in range(6):
        served.add(f"small {i}", [3 + i], 2)
    served.finish()
    first = order(served, "admitted")
    assert first.index("head") == 1 + limit
    assert first[1 : 1 + limit] == [f"small {i}" for i in range(limit)]
    assert served.tokens("head") == direct([2] * 24, 2)


@pytest.mark.parametrize("seed", range(12))
def test_overtaking_is_bounded_in_any_workload(seed: int) -> None:
    """Slots to spare and no cache, so that memory is all there is to wait for."""
    rng = random.Random(seed)
    limit = rng.choice([0, 0, 1, 4])
    jobs = serving.workload(seed, 25, spread_s=rng.choice([0.0, 0.3]))
    served = Served(
        config(
            rng.choice([1, 2, 4]),
            rng.choice([1, 2, 3]),
            rng.choice([1, 4]),
            num_blocks=48,
            max_num_seqs=25,
            enable_prefix_caching=False,
            skip_limit=limit,
        )
    )
    serve(served, jobs)
    first = [e for e in served.of("admitted") if e.data["first"]]
    admitted = [int(e.request_id or 0) for e in first]
    ahead = {i: (job.arrival_s, i) for i, job in enumerate(jobs)}
    passed = []
    for place, i in enumerate(admitted):
        passed.append(sum(ahead[j] > ahead[i] for j in admitted[:place]))
    assert max(passed) <= limit
    if not limit:
        assert admitted == sorted(admitted, key=lambda i: ahead[i])


@pytest.mark.parametrize("limited_by", ["slots", "blocks"])
@pytest.mark.parametrize("launches", [1, 2, 3])
def test_a_smaller_class_displaces_the_farthest_and_no_more_than_it_needs(
    launches: int, limited_by: str
) -> None:
    slots, blocks = (3, 40) if limited_by == "slots" else (8, 10)
    served = Served(
        config(4, launches, 1, num_blocks=blocks, max_num_seqs=slots),
        policy=by_priority(),
    )
    prompts = {"a": [1] * 9, "b": [2] * 9, "c": [3] * 9}  # 3 blocks each
    for name, prompt in prompts.items():
        served.add(name, prompt, 4, priority=1 if name == "a" else 2)
    served.step()
    assert order(served, "admitted") == ["a", "b", "c"]
    served.add("urgent", [7] * 6, 4, priority=0)  # 2 or 3 blocks, and one is free
    served.step()
    assert order(served, "preempted") == ["c"]
    assert order(served, "admitted")[-1] == "urgent"
    served.finish()
    for name, prompt in prompts.items():
        assert served.tokens(name) == direct(prompt, 4)
    assert served.tokens("urgent") == direct([7] * 6, 4)


@pytest.mark.parametrize("limited_by", ["slots", "blocks"])
@pytest.mark.parametrize("policy", [fcfs, equals])
def test_equals_never_displace(policy, limited_by: str) -> None:
    slots, blocks = (2, 40) if limited_by == "slots" else (8, 6)
    served = Served(
        config(4, 1, 1, num_blocks=blocks, max_num_seqs=slots), policy=policy()
    )
    served.add("a", [1] * 9, 3, arrival_time=0.0)
    served.add("b", [2] * 9, 3, arrival_time=0.0)
    served.step()
    served.add("earlier", [3] * 9, 3, arrival_time=-1.0)
    served.finish()
    assert not served.of("preempted")
    assert order(served, "finished") == ["a", "b", "earlier"]


def test_nobody_is_displaced_in_vain() -> None:
    """What evicting and displacing give together must be enough, or none is lost."""
    served = Served(config(4, 1, 1, num_blocks=8, max_num_seqs=8), policy=by_priority())
    served.add("same", [1] * 17, 4, priority=0)  # 5 blocks
    served.add("low", [2] * 5, 4, priority=1)  # 2 blocks
    served.step()
    served.add("big", [3] * 13, 2, priority=0)  # 4: one is free, two are low's
    served.step()
    served.step()
    assert not served.of("preempted")
    assert len(served.tokens("low")) == 3
    served.finish()
    assert not served.of("preempted")
    assert order(served, "finished")[-1] == "big"


def test_evicting_comes_before_displacing() -> None:
    served = Served(config(4, 1, 1, num_blocks=8, max_num_seqs=8), policy=by_priority())
    served.run("cached", [9] * 16, 1)  # four idle blocks
    served.add("low", [1] * 12, 2, priority=1)  # three or four
    served.step()
    assert served.stats()["free_blocks"] == 1
    served.add("urgent", [2] * 14, 1, priority=0)  # four: three by evicting
    served.step()
    assert not served.of("preempted") and served.tokens("urgent")
    served.finish()
    assert served.tokens("low") == direct([1] * 12, 2)


def test_what_the_displaced_still_needed_is_needed_no_more() -> None:
    served = Served(
        config(4, 1, 1, num_blocks=8, max_num_seqs=8, max_chunk_tokens=4),
        policy=by_priority(),
    )
    served.add("low", [1] * 24, 1, priority=1)  # one block of six so far
    served.step()
    served.add("urgent", [2] * 20, 1, priority=0)  # five: they do not fit together
    served.step()
    assert order(served, "preempted") == ["low"]
    assert order(served, "admitted") == ["low", "urgent"]
    served.finish()
    assert order(served, "finished") == ["urgent", "low"]


def test_the_displaced_are_enough_and_the_shared_are_no_gain() -> None:
    """Blocks that stay pinned by others are not counted as what a victim gives."""
    served = Served(config(4, 1, 1, num_blocks=8, max_num_seqs=8), policy=by_priority())
    shared = list(range(12))
    served.run("first", shared, 1)  # three blocks cached
    served.add("holds", [*shared, 1], 8, priority=0)  # 3 shared, 1 or 2 of its own
    served.add("low", [*shared, 2], 8, priority=1)  # 3 shared, 1 or 2 of its own
    served.step()
    assert served.stats()["free_blocks"] == 3
    # Free 3, and low's one: 4 < 5, although low has 4 columns.
    served.add("big", [50 + i for i in range(17)], 1, priority=0)
    served.step()
    assert not served.of("preempted") and not served.of("admitted", "big")
    served.finish()
    assert served.tokens("big") == direct([50 + i for i in range(17)], 1)


@pytest.mark.parametrize(("launches", "steps"), SCHEDULES)
def test_a_preempted_request_goes_before_its_equals(launches: int, steps: int) -> None:
    served = Served(
        config(4, launches, steps, num_blocks=40, max_num_seqs=2), policy=equals()
    )
    served.add("a", [1] * 5, 9, priority=1)
    served.add("b", [2] * 5, 9, priority=1)
    served.step()
    served.add("c", [3] * 5, 9, priority=1)
    served.add("urgent", [4], 2, priority=0)
    served.finish()
    admitted = order(served, "admitted")
    assert order(served, "preempted") == ["b"]
    assert admitted == ["a", "b", "urgent", "b", "c"]
