"""What waits below the device, by hand: who has which block, and what becomes of
evicted ones."""

from __future__ import annotations

import pytest

from jaxserve.core import Request
from jaxserve.moves import Arrived, Erase, Label, Moves, Save, Spill
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.payloads import Payloads
from jaxserve.scheduling.plan_builder import PlanBuilder
from jaxserve.scheduling.running import Running
from jaxserve.scheduling.swap_space import SwapSpace
from jaxserve.scheduling.tiers import Place, Tiers
from tests.scheduling.labels import (
    H,
    erased,
    flushed,
    handle_spill,
    key,
    keys,
    label,
    on_disk,
    on_host,
    plan,
)


def stay(index: int, slot: int, path: str, rows: int) -> Running:
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
        keys=keys(path),
        handles=list(range(len(path))),
        placed=0,
    )


def pool(space: SwapSpace) -> tuple[int, int]:
    """Blocks of the pool: (used, free)."""
    payloads = space.tiers.payloads
    return payloads.used("pool"), payloads.free("pool")


def files(built: PlanBuilder) -> dict[int, Label]:
    """Payloads that a plan writes, and what as."""
    return {save.name: save.label for save in built.save}


# On the host --------------------------------------------------------------------------


def test_private_columns_leave_at_once_and_named_ones_when_they_are_evicted() -> None:
    space, first = SwapSpace(Tiers(Payloads(4), write="never")), plan()
    space.take(first, stay(0, 2, "ab", 10), range(2, 3), promised=2)
    assert first.spill == [Spill(0, 2, 2, H)]
    assert pool(space) == (1, 1) and space.used == 1
    second = plan()
    space.evicted(second, 8, label("ab"))
    assert second.spill == [handle_spill(1, 8)]
    assert pool(space) == (2, 1)  # of what was set aside
    space.evicted(second, 9, label("x"))  # nobody wants it
    space.evicted(second, 9, None)
    assert len(second.spill) == 1
    assert space.sources(0, range(1, 3)) == on_host(1, 0)
    assert space.sources(0, range(0, 3)) is None  # "a" is neither here nor found
    assert space.sources(0, range(2, 4)) is None  # it had no more
    space.drop(0)
    assert pool(space) == (1, 3) and space.used == 0  # a cached block is left
    assert space.tiers.room_in_pool() == 4 and space.tiers.host.evictable == 1
    assert flushed(space.tiers, plan()) == Moves(drop=(0,))
    assert space.holds_nothing() and space.tiers.holds_nothing()


def test_a_block_sealed_and_evicted_in_one_plan_is_read_where_it_lies() -> None:
    space, both = SwapSpace(Tiers(Payloads(4))), plan()
    both.seal.append((2, 0, 7))
    space.take(both, stay(0, 2, "a", 6), range(1, 2), promised=1)
    space.evicted(both, 7, label("a"))
    assert both.spill == [Spill(0, 2, 1, H), Spill(1, 2, 0, H)]


def test_two_that_share_a_prefix_share_its_copy() -> None:
    space, first = SwapSpace(Tiers(Payloads(5))), plan()
    # The other still used "a" and "ab" when 0 left, so they were not promised to it.
    space.take(first, stay(0, 0, "ab", 10), range(2, 3), promised=0)
    space.take(first, stay(1, 1, "ab", 9), range(2, 3), promised=2)
    assert pool(space) == (2, 1)
    space.evicted(first, 8, label("ab"))
    space.evicted(first, 8, label("ab"))  # under another handle: it is here
    space.evicted(first, 9, label("a"))
    assert pool(space) == (4, 1) and space.used == 2
    assert space.sources(0, range(0, 3)) == on_host(3, 2, 0)
    assert space.sources(1, range(0, 3)) == on_host(3, 2, 1)
    # They are copied for the one to whom room was promised.
    assert space.tiers.payloads.take_copied() == [(0, 0), (1, 1), (1, 2), (1, 3)]
    space.drop(1)
    assert pool(space) == (3, 2)
    assert space.tiers.room_in_pool() == 2  # 0 still wants the copies
    space.drop(0)
    assert pool(space) == (2, 3) and space.tiers.room_in_pool() == 5


def test_where_nothing_was_promised_and_nothing_is_free_it_is_lost() -> None:
    space, first = SwapSpace(Tiers(Payloads(2))), plan()
    space.take(first, stay(0, 0, "a", 6), range(1, 2), promised=0)
    space.take(first, stay(1, 1, "z", 6), range(1, 2), promised=0)
    assert pool(space) == (2, 0)
    space.evicted(first, 8, label("a"))
    assert 0 not in space.waiting and 1 in space.waiting and space.lost == 1
    assert pool(space) == (1, 1)
    assert flushed(space.tiers, first).drop == (0,)


def test_what_two_want_and_nobody_can_keep_is_lost_to_both() -> None:
    space, first = SwapSpace(Tiers(Payloads(2))), plan()
    for index in (0, 1):
        space.take(first, stay(index, index, "ab", 9), range(2, 3), promised=0)
    space.evicted(first, 8, label("ab"))
    assert space.lost == 2 and not space.waiting and space.holds_nothing()
    assert pool(space) == (0, 2)


def test_what_follows_a_lost_block_is_lost_too() -> None:
    tiers = disk(9, 1, 1, "ab")
    space, first = SwapSpace(tiers), plan()
    space.take(first, stay(0, 0, "a", 5), range(1, 2), promised=0)
    tiers.load(first, label("ab"), request=7)  # for another: the window is full
    space.evicted(first, 8, label("a"))
    assert space.lost == 1 and flushed(tiers, first).erase == erased("ab")


def test_what_one_loses_makes_room_for_another() -> None:
    device = {key("a")}
    tiers = Tiers(Payloads(2), on_device=device.__contains__)
    space, first = SwapSpace(tiers), plan()
    space.take(first, stay(0, 0, "ab", 9), range(2, 3), promised=0)
    space.take(first, stay(1, 1, "a", 5), range(1, 2), promised=0)
    space.evicted(first, 8, label("ab"))
    assert space.lost == 1 and sorted(space.waiting) == [1]
    # Now there is room for one.
    device.clear()
    space.evicted(first, 9, label("a"))
    assert space.lost == 1 and space.sources(1, range(0, 2)) == on_host(2, 1)


def test_room_for_the_swapped_is_made_by_evicting_cached_blocks() -> None:
    space, first = SwapSpace(Tiers(Payloads(3))), plan()
    for handle, path in enumerate(["x", "xy", "z"]):
        space.evicted(first, handle, label(path))  # cached: payloads 0, 1 and 2
    space.take(first, stay(0, 3, "", 6), range(0, 1), promised=1)
    assert pool(space) == (2, 0)
    moves = flushed(space.tiers, first)
    assert moves.drop == (1, 0) and moves.spill[-1] == Spill(3, 3, 0, H)
    assert space.tiers.find(keys("z")) == on_host(2)
    space.evicted(first, 5, label("w"))  # what is promised is not for the cache
    assert pool(space) == (2, 0) and space.tiers.find(keys("z")) == []


def test_a_block_that_is_cached_on_the_host_already_is_kept_for_the_swapped() -> None:
    space, first = SwapSpace(Tiers(Payloads(3))), plan()
    space.evicted(first, 4, label("a"))  # payload 0; it comes back to the device
    space.take(first, stay(0, 3, "a", 6), range(1, 2), promised=1)
    assert pool(space) == (2, 0) and space.tiers.room_in_pool() == 0
    space.evicted(first, 5, label("a"))
    assert len(first.spill) == 2
    assert space.sources(0, range(0, 2)) == on_host(0, 1)
    space.drop(0)
    assert space.tiers.room_in_pool() == 3 and space.holds_nothing()


@pytest.mark.parametrize("path", ["", "ab"])
def test_what_ends_leaves_nothing(path: str) -> None:
    space, only = SwapSpace(Tiers(Payloads(9))), plan()
    space.take(only, stay(0, 0, path, 11), range(len(path), 3), promised=len(path))
    assert not space.holds_nothing() and space.tiers.holds_nothing() == (not path)
    space.drop(0)
    space.drop(0)  # once is enough
    flushed(space.tiers, only)
    assert space.holds_nothing() and space.tiers.holds_nothing()
    assert pool(space) == (0, 9)


# On disk ------------------------------------------------------------------------------


def disk(blocks: int = 9, window: int = 4, pool: int = 0, *stored: str) -> Tiers:
    labels = [label(path) for path in stored]
    return Tiers(Payloads(pool, window=window), blocks, write="never", stored=labels)


def test_all_that_a_request_needs_is_written_at_once() -> None:
    space, built = SwapSpace(disk()), plan()
    named = [(7, label("a")), (8, label("ab"))]
    space.take_to_disk(built, stay(0, 2, "ab", 10), range(2, 4), named)
    assert built.spill == [
        handle_spill(0, 7),
        handle_spill(1, 8),
        Spill(2, 2, 2, H),
        Spill(3, 2, 3, H),
    ]
    assert list(files(built)) == [0, 1, 2, 3]
    assert [files(built)[name] for name in (0, 1)] == [label("a"), label("ab")]
    assert space.used == 2 and space.tiers.disk_used == 4
    assert space.tiers.payloads.take_copied() == [(0, name) for name in range(4)]
    # Until all that the device has not kept are there, it waits.
    assert space.sources(0, range(0, 4)) is True
    space.tiers.arrived(Arrived(done=(1, 2, 3)))
    assert space.sources(0, range(0, 4)) is True
    assert space.sources(0, range(1, 4)) == [
        *on_disk("ab"),
        Place("disk", label=files(built)[2]),
        Place("disk", label=files(built)[3]),
    ]
    space.tiers.arrived(Arrived(done=(0,)))
    places = space.sources(0, range(0, 4))
    assert isinstance(places, list) and places[:2] == on_disk("a", "ab")
    assert all(map(space.tiers.has, places))
    flushed(space.tiers, plan())
    # Its own columns are erased with it; what has a name is cached.
    space.drop(0)
    mine = files(built)
    assert flushed(space.tiers, plan()).erase == (Erase(mine[2]), Erase(mine[3]))
    assert space.tiers.find(keys("ab")) == on_disk("a", "ab")
    assert space.holds_nothing() and space.tiers.holds_nothing()


def test_what_is_below_already_is_not_copied_again() -> None:
    tiers = disk(9, 4, 1, "a")
    space, built = SwapSpace(tiers), plan()
    tiers.keep(built, 8, label("ab"))  # on the host alone: payload 0
    flushed(tiers, built)
    built = plan()
    named = [(7, label("a")), (8, label("ab"))]
    space.take_to_disk(built, stay(0, 2, "ab", 10), range(2, 3), named)
    assert built.spill == [Spill(1, 2, 2, H)]
    assert built.save[0] == Save(0, label("ab")) and list(files(built)) == [0, 1]
    tiers.arrived(Arrived(done=(0, 1)))
    places = space.sources(0, range(0, 3))
    assert isinstance(places, list)
    assert places[:2] == [*on_disk("a"), *on_host(0)]


def test_what_it_needs_is_kept_on_a_full_disk() -> None:
    tiers = disk(2, 4, 0, "a", "x")
    space, built = SwapSpace(tiers), plan()
    space.take_to_disk(built, stay(0, 2, "a", 6), range(1, 2), [(7, label("a"))])
    assert flushed(tiers, built).erase == erased("x")
    assert len(built.save) == 1 and tiers.room_on_disk() == 0
    space.drop(0)
    tiers.arrived(Arrived(done=(0,)))
    assert tiers.room_on_disk() == 2


@pytest.mark.parametrize("failed", [0, 1])
def test_a_request_whose_column_cannot_be_written_is_lost(failed: int) -> None:
    space, built = SwapSpace(disk()), plan()
    space.take_to_disk(built, stay(0, 2, "a", 6), range(1, 2), [(7, label("a"))])
    space.tiers.arrived(Arrived(done=(1 - failed,), failed=(failed,)))
    assert space.sources(0, range(0, 2)) is None
    # Where the device still has the named one, only the other counts.
    found = space.sources(0, range(1, 2))
    assert found == (None if failed else [Place("disk", label=files(built)[1])])
    space.drop(0)
    flushed(space.tiers, plan())
    assert space.holds_nothing() and space.tiers.holds_nothing()
    assert space.tiers.disk_used == failed  # the named one is cached


def test_the_last_copy_goes_to_disk_where_the_host_is_full() -> None:
    tiers = disk(9, 1, 1)
    space, built = SwapSpace(tiers), plan()
    space.take(built, stay(0, 2, "a", 6), range(1, 2), promised=0)
    space.evicted(built, 7, label("a"))
    assert built.save == [Save(1, label("a"))] and space.lost == 0
    assert tiers.payloads.take_copied() == [(0, 0), (0, 1)]
    assert space.sources(0, range(0, 2)) is True
    tiers.arrived(Arrived(done=(1,)))
    assert space.sources(0, range(0, 2)) == [*on_disk("a"), *on_host(0)]


def test_what_is_on_disk_needs_no_other_copy_unless_room_was_promised() -> None:
    tiers = disk(9, 1, 4, "a", "x")
    space, built = SwapSpace(tiers), plan()
    space.take(built, stay(0, 2, "a", 6), range(1, 2), promised=0)
    space.evicted(built, 7, label("a"))
    assert len(built.spill) == 1
    space.take(built, stay(1, 3, "x", 6), range(1, 2), promised=1)
    space.evicted(built, 8, label("x"))
    assert built.spill[2:] == [handle_spill(2, 8)] and tiers.payloads.promised == 0
    assert space.sources(0, range(0, 2)) == [*on_disk("a"), *on_host(0)]
    assert space.sources(1, range(0, 2)) == on_host(2, 1)
