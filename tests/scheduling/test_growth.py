"""Who gives way to a running request that needs memory: on the definition."""

from __future__ import annotations

import random

import pytest

from tests import serving
from tests.engine.harness import (
    Served,
    config,
    order,
    serve,
)
from tests.serving import direct


def rows(served: Served) -> list[int]:
    """How many rows each launch with any had."""
    return [len(e.data["slots"]) for e in served.of("launch") if e.data["slots"]]


def test_growth_takes_from_the_farthest_behind_and_the_last_sits_out() -> None:
    served = Served(config(4, 1, 1, num_blocks=3, max_num_seqs=4))
    for name in ("a", "b", "c"):
        served.add(name, [ord(name) - 96] * 3, 6)  # 8 rows: two blocks
    served.step()
    served.step()
    assert rows(served) == [3, 3] and served.stats()["free_blocks"] == 0
    served.add("d", [9], 1)
    served.step()  # each needs a second block
    assert order(served, "preempted") == ["c"]
    assert rows(served)[2] == 1  # a has c's block; b is the last, and sits out
    assert len(served.tokens("a")) == 3 and len(served.tokens("b")) == 2
    assert served.stats()["running"] == 2  # b holds its block
    # Nobody is admitted in a plan that preempted for memory, however small.
    assert not served.of("admitted", "d")
    served.finish()
    assert order(served, "preempted") == ["c"]
    assert order(served, "admitted") == ["a", "b", "c", "c", "d"]
    for name in ("a", "b", "c"):
        assert served.tokens(name) == direct([ord(name) - 96] * 3, 6)


@pytest.mark.parametrize("seed", range(12))
def test_under_fcfs_only_growth_preempts_and_only_those_behind(seed: int) -> None:
    rng = random.Random(seed)
    jobs = serving.workload(seed, 20, spread_s=rng.choice([0.0, 0.2]))
    served = Served(
        config(
            size := rng.choice([1, 2, 4]),
            rng.choice([1, 2, 3]),
            rng.choice([1, 4]),
            num_blocks=46 // size,
            max_num_seqs=6,
        )
    )
    serve(served, jobs)
    place = {f"{i}": (job.arrival_s, i) for i, job in enumerate(jobs)}
    running: set[str] = set()
    lost_in_plan = None
    for event in served.events:
        name = event.request_id or ""
        if event.kind == "admitted":
            assert lost_in_plan is None, "admitted in a plan that preempted"
            running.add(name)
        elif event.kind == "preempted":
            # The farthest behind goes; whoever grew is ahead of it.
            assert place[name] == max(place[r] for r in running)
            running.remove(name)
            assert running
            lost_in_plan = name
        elif event.kind == "finished":
            running.discard(name)
        if event.kind in ("progressed", "launch"):  # the plan has been submitted
            lost_in_plan = None
