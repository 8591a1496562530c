"""Preemption by swap: faults of other engines as cases, and what moves, by hand. (PS1
stands with its kind in test_cases_preemption.py.)

On the definition a payload holds the token ids of its block, and a row that nobody
wrote is told from one that was; on the device the hash model reads back what came.
"""

from __future__ import annotations

import dataclasses

import pytest

from jaxserve.executors.link import LinkCost
from tests.engine.harness import (
    EXECUTORS,
    JAX,
    R_5_TO_9,
    SCHEDULES,
    Served,
    by_priority,
    config,
    preempt,
)
from tests.serving import direct

# Nothing on the host but swapped requests.
SWAP = {"preemption_mode": "swap", "num_swap_blocks": 64, "tier_write": "never"}


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    ("urgent_tokens", "evicted", "cached"), [(16, 0, 8), (20, 1, 4), (24, 2, 0)]
)
def test_named_blocks_are_copied_when_they_are_evicted(
    executor: str, urgent_tokens: int, evicted: int, cached: int
) -> None:
    # r has 5 + 6 - 1 = 10 rows: two named blocks, which stay, and a private one. Of 6
    # blocks the urgent prompt needs 4, 5 or 6.
    shape = dataclasses.replace(JAX, max_num_seqs=1, num_blocks=6, **SWAP)
    served = Served(shape, policy=by_priority(), executor=EXECUTORS[executor])
    served.add("r", range(5, 10), 8)
    served.until(lambda: len(served.tokens("r")) == 6)
    served.add("urgent", range(40, 40 + urgent_tokens), 1, priority=-1)
    served.until(lambda: bool(served.tokens("urgent")))
    stats = served.stats()
    assert (stats["swapped_blocks"], stats["host_cached_blocks"]) == (1, evicted)
    served.finish()
    assert served.tokens("r") == R_5_TO_9
    assert served.tokens("urgent") == direct(range(40, 40 + urgent_tokens), 1)
    again = served.of("admitted", "r")[1].data
    assert again["cached_tokens"] == cached
    assert again["restored_tokens"] == again["context_tokens"] - cached == 10 - cached
    stats = served.stats()
    assert stats["spilled_blocks"] == stats["restored_blocks"] == 1 + evicted
    assert stats["recomputed_tokens"] == 0


@pytest.mark.parametrize(("launches", "steps"), SCHEDULES)
@pytest.mark.parametrize("room", [0, 2, 3])
def test_ps5_without_room_on_the_host(room: int, launches: int, steps: int) -> None:
    """PS5 (vllm#546, #787, #5578): swap space full, and all stood still or aborted."""
    served = Served(
        config(4, launches, steps, preemption_mode="swap", num_swap_blocks=room),
        policy=by_priority(),
    )
    served.add("mate", [3, 1, 4, 1], 40, priority=-1)
    served.add("r", range(11, 17), 20)
    served.until(lambda: len(served.tokens("r")) >= 4)  # 9 rows or more: 3 blocks
    before = len(served.tokens("mate"))
    preempt(served)
    (lost,) = served.of("preempted", "r")
    held = -(-lost.data["lost_tokens"] // 4)
    swapped = held <= room
    assert lost.data["mode"] == ("swap" if swapped else "recompute")
    stats = served.stats()
    assert stats["preemptions"] == 1 and stats["preemptions_by_swap"] == swapped
    assert len(served.tokens("mate")) > before
    served.finish()
    assert served.tokens("r") == direct(range(11, 17), 20)
    assert served.tokens("mate") == direct([3, 1, 4, 1], 40)
    assert (room, launches, steps) != (3, 1, 1) or swapped


@pytest.mark.parametrize("executor", EXECUTORS)
def test_ps5_room_for_all_but_one_of_two_victims(executor: str) -> None:
    """PS5: what does not fit beside another victim is computed again."""
    shape = dataclasses.replace(JAX, preemption_mode="swap", num_swap_blocks=4)
    served = Served(shape, policy=by_priority(), executor=EXECUTORS[executor])
    for name in ("a", "b"):
        served.add(name, [ord(name) % 97] * 9, 6)
    for i in range(7):
        served.add(f"mate {i}", [i], 40, priority=-1)
    served.until(lambda: len(served.tokens("b")) == 2)
    for i in range(2):
        served.add(f"urgent {i}", [90 + i], 1, priority=-2)
    served.until(lambda: len(served.of("preempted")) == 2)
    modes = {e.request_id: e.data["mode"] for e in served.of("preempted")}
    assert sorted(modes.values()) == ["recompute", "swap"]  # 3 blocks each
    served.finish()
    for name in ("a", "b"):
        assert served.tokens(name) == direct([ord(name) % 97] * 9, 6)


def _while_fetching(served: Served) -> None:
    """Step until the payloads of "r" are on their way to the device."""
    served.until(lambda: any(moves.fetch for moves in served.recorder.moves))
    assert len(served.of("admitted", "r")) == 1, "it has been restored already"


SLOW = LinkCost(block_s=1.0, fixed_s=1.0)


def test_al5_aborted_while_its_blocks_are_loaded() -> None:
    """AL5 (vllm-ascend#16662, sglang#35049): a late copy landed in another's blocks.

    No block is held for a load: who comes next has them at once, and what arrives late
    goes nowhere.
    """
    served = Served(
        config(4, 1, 1, max_num_seqs=1, num_blocks=3, **SWAP),
        policy=by_priority(),
        link=SLOW,
    )
    served.add("r", range(5, 10), 8)
    served.until(lambda: len(served.tokens("r")) == 3)
    served.add("urgent", range(12), 1, priority=-1)  # all three blocks
    served.until(lambda: bool(served.tokens("urgent")))
    _while_fetching(served)
    served.engine.abort_request("r")
    served.add("b", range(20, 29), 4)  # 12 rows: all three again
    served.finish()
    assert served.tokens("b") == direct(range(20, 29), 4)
    assert served.tokens("r") == R_5_TO_9[:3] and served.reason("r") == "abort"
    assert served.free() == 3


def test_others_run_while_blocks_are_loaded() -> None:
    # r comes first in rank, but its blocks take seconds.
    served = Served(
        config(4, 1, 1, max_num_seqs=1, **SWAP), policy=by_priority(), link=SLOW
    )
    served.add("r", range(5, 10), 8)
    served.until(lambda: len(served.tokens("r")) == 3)
    preempt(served)
    _while_fetching(served)
    served.add("later", [2, 7, 1], 4, priority=1)
    served.until(lambda: len(served.tokens("later")) == 4)
    assert len(served.tokens("r")) == 3
    served.finish()
    assert served.tokens("r") == R_5_TO_9
    assert served.tokens("later") == direct([2, 7, 1], 4)


def test_nobody_is_displaced_for_blocks_that_have_not_come() -> None:
    # Two blocks take 0.15 s a way; low's 40 tokens would take 0.44 s.
    served = Served(
        config(4, 1, 1, max_num_seqs=1, **SWAP),
        policy=by_priority(),
        link=LinkCost(block_s=0.05, fixed_s=0.05),
    )
    served.add("r", range(5, 10), 8)
    served.until(lambda: len(served.tokens("r")) == 3)
    preempt(served)
    _while_fetching(served)
    served.add("low", [2, 7, 1], 40, priority=1)
    served.until(lambda: len(served.tokens("low")) >= 2)
    served.until(lambda: bool(served.of("preempted", "low")))
    # It gave way in the very plan that took r back.
    (gave,) = served.of("preempted", "low")
    back = served.of("admitted", "r")[1]
    assert gave.time_s == back.time_s
    served.finish()
    assert served.tokens("r") == R_5_TO_9
    assert served.tokens("low") == direct([2, 7, 1], 40)


@pytest.mark.parametrize("caching", [True, False])
def test_a_cache_that_is_forgotten_costs_a_swap_no_token(caching: bool) -> None:
    """Named columns that `reset_prefix_cache` forgets are computed again."""
    served = Served(
        config(4, 1, 1, max_num_seqs=1, enable_prefix_caching=caching, **SWAP),
        policy=by_priority(),
    )
    served.add("r", range(5, 10), 8)
    served.until(lambda: len(served.tokens("r")) == 6)
    served.add("urgent", [90], 1, priority=-1)
    served.step()
    served.engine.reset_prefix_cache()
    served.finish()
    assert served.tokens("r") == R_5_TO_9
    stats = served.stats()
    assert stats["lost_swaps"] == (1 if caching else 0)
    assert stats["recomputed_tokens"] == (5 + 6 if caching else 0)
