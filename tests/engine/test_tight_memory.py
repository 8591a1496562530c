"""The smallest memory there may be: all get through, and nobody is thrashed.

The bound is docs/design.md's: whoever comes back after a preemption for memory stays
until somebody has filled a block since, so for B launches, the first of which restores
what was copied.
"""

from __future__ import annotations

import math
import random

import pytest

from tests.engine.harness import Served, config
from tests.serving import direct

LEAST = {"recompute": 4, "swap": 3, "disk": 3, "auto": 3}
"""Tokens that a request samples between two preemptions for memory; B is 4."""


def least(mode: str, caching: bool) -> int:
    """As LEAST, but where a block may be held twice, under its name and privately."""
    return 1 if caching else LEAST[mode]


def serve(mode: str, caching: bool, seed: int, *, slots: int) -> Served:
    """Random requests in a pool of 1.2 times the largest, FCFS."""
    rng = random.Random(seed)
    jobs = [
        ([rng.randrange(97)] * rng.randint(1, 30), rng.randint(1, 34))
        for _ in range(24)
    ]
    largest = max(-(-(len(prompt) + tokens - 1) // 4) for prompt, tokens in jobs)
    shape = config(
        4,
        1,
        1,
        max_num_seqs=slots,
        num_blocks=math.ceil(1.2 * largest),
        enable_prefix_caching=caching,
        preemption_mode=mode,
        num_swap_blocks=0 if mode == "disk" else 40,
        num_disk_blocks=100 if mode in ("disk", "auto") else 0,
    )
    served = Served(shape, seed=seed)
    for i, (prompt, tokens) in enumerate(jobs):
        served.add(str(i), prompt, tokens)
    served.finish()
    for i, (prompt, tokens) in enumerate(jobs):
        assert served.tokens(str(i)) == direct(prompt, tokens)
        stayed = served.of("preempted", str(i))
        assert len(stayed) <= 1 + tokens / least(mode, caching)
    return served


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("mode", LEAST)
def test_preemptions_are_bounded_in_a_pool_little_larger_than_one_request(
    mode: str, caching: bool
) -> None:
    preemptions = 0
    for seed in range(8):
        served = serve(mode, caching, seed, slots=6)
        preemptions += served.stats()["preemptions"]
        # Whoever came back got on before it was preempted again.
        for i in range(24):
            got = 0
            for event in served.events:
                if event.request_id != str(i):
                    continue
                if event.kind == "admitted":
                    got = 0 if not event.data["first"] else 4
                elif event.kind == "progressed":
                    got += event.data["output_tokens"]
                elif event.kind == "preempted":
                    assert got >= least(mode, caching), f"request {i} of seed {seed}"
    assert preemptions > 0


def test_the_first_in_rank_never_gives_way() -> None:
    for seed in range(8):
        served = serve("recompute", True, seed, slots=6)
        assert not served.of("preempted", "0")
