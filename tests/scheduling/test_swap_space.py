"""Host blocks counted by hand: who has which, and what becomes of evicted ones."""

from __future__ import annotations

import pytest

from jaxserve.config import EngineConfig, SamplingParams
from jaxserve.core import Request
from jaxserve.moves import Spill
from jaxserve.scheduling.plan_builder import PlanBuilder
from jaxserve.scheduling.running import Running
from jaxserve.scheduling.swap_space import SwapSpace

SHAPE = EngineConfig(
    max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16, block_size=4
).shape(16)
S, M, H = SHAPE.max_slots, SHAPE.max_blocks_per_slot, SHAPE.num_handles


def plan() -> PlanBuilder:
    return PlanBuilder(SHAPE, 16)


def stay(index: int, slot: int, keys: list[bytes], rows: int) -> Running:
    """A request that has decoded up to so many KV rows."""
    request = Request(
        str(index), index, [1] * (rows - 1), SamplingParams(), max_output_tokens=9
    )
    request.output = [5, 6]
    return Running(
        request=request,
        slot=slot,
        context=rows - 1,
        planned=rows,
        rows=rows,
        cached=0,
        keys=list(keys),
        handles=list(range(len(keys))),
        placed=0,
    )


def test_private_columns_leave_at_once_and_named_ones_when_they_are_evicted() -> None:
    space, first = SwapSpace(4), plan()
    space.take(first, stay(0, 2, [b"a", b"b"], 10), range(2, 3), promised=2)
    assert first.spill == [Spill(0, 2, 2, H)]
    assert (space.used, space.free) == (1, 1)
    second = plan()
    space.evict(second, 8, b"b")
    assert second.spill == [Spill(1, S, M, 8)]
    assert (space.used, space.free) == (2, 1)  # of what was set aside
    space.evict(second, 9, b"x")  # nobody wants it
    space.evict(second, 9, None)
    assert len(second.spill) == 1
    assert space.payloads(0, range(1, 3)) == [1, 0]
    assert space.payloads(0, range(0, 3)) is None  # "a" is neither here nor found
    space.drop(0)
    assert (space.used, space.free) == (0, 4)
    third = plan()
    space.flush(third)
    assert sorted(third.drop) == [0, 1]
    assert space.holds_nothing() and not space.has_dropped


def test_a_block_sealed_and_evicted_in_one_plan_is_read_where_it_lies() -> None:
    space, both = SwapSpace(4), plan()
    both.seal.append((2, 0, 7))
    space.take(both, stay(0, 2, [b"a"], 6), range(1, 2), promised=1)
    space.evict(both, 7, b"a")
    assert both.spill == [Spill(0, 2, 1, H), Spill(1, 2, 0, H)]


def test_two_that_share_a_prefix_share_its_copy() -> None:
    space, first = SwapSpace(5), plan()
    # The other still used "a" and "b" when 0 left, so they were not promised to it.
    space.take(first, stay(0, 0, [b"a", b"b"], 10), range(2, 3), promised=0)
    space.take(first, stay(1, 1, [b"a", b"b"], 9), range(2, 3), promised=2)
    assert (space.used, space.free) == (2, 1)
    space.evict(first, 8, b"b")
    space.evict(first, 8, b"b")  # under another handle: it is here
    space.evict(first, 9, b"a")
    assert (space.used, space.free) == (4, 1)
    assert space.payloads(0, range(0, 3)) == [3, 2, 0]
    assert space.payloads(1, range(0, 3)) == [3, 2, 1]
    space.drop(1)
    assert (space.used, space.free) == (3, 2)  # 0 still wants the copies
    space.drop(0)
    assert (space.used, space.free) == (0, 5)


def test_where_nothing_was_promised_and_nothing_is_free_it_is_lost() -> None:
    space, first = SwapSpace(2), plan()
    space.take(first, stay(0, 0, [b"a"], 6), range(1, 2), promised=0)
    space.take(first, stay(1, 1, [b"z"], 6), range(1, 2), promised=0)
    assert space.free == 0
    space.evict(first, 8, b"a")
    assert 0 not in space.waiting and 1 in space.waiting
    assert (space.used, space.free) == (1, 1)


def test_nothing_is_fetched_before_the_launch_that_copied_it_is_read() -> None:
    space, first = SwapSpace(4), plan()
    space.take(first, stay(0, 0, [], 6), range(0, 2), promised=0)
    names = space.payloads(0, range(0, 2))
    assert names == [0, 1] and space.fetches(0, names)  # not yet
    space.read([0, 1])
    assert not space.fetches(0, names) and not space.fetching
    second = plan()
    space.fetch(second, 0, names)
    assert second.fetch == [0, 1] and space.fetches(0, names) and space.fetching
    space.arrive([0])
    assert space.fetching and not space.has_arrived(names)
    space.arrive([1, 77])  # 77 was dropped by somebody else
    assert not space.fetching and space.has_arrived(names)
    assert space.has_arrived([1])  # a longer prefix was found on the device
    space.drop(0)
    assert not space.has_arrived([1])


@pytest.mark.parametrize("keys", [[], [b"a", b"b"]])
def test_what_ends_leaves_nothing(keys: list[bytes]) -> None:
    space, only = SwapSpace(9), plan()
    space.take(only, stay(0, 0, keys, 11), range(len(keys), 3), promised=len(keys))
    space.drop(0)
    space.drop(0)  # once is enough
    space.flush(only)
    assert space.holds_nothing() and space.free == 9
