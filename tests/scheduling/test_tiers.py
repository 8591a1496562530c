"""Cached blocks below the device, by hand: who goes where, and who leaves."""

from __future__ import annotations

import pytest

from jaxserve.moves import Arrived, Erase, Label, Load, Moves, Save, Spill
from jaxserve.scheduling.payloads import Payloads
from jaxserve.scheduling.tiers import Place, Tiers, Write
from tests.scheduling.labels import (
    H,
    but_erasing,
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

EVERY_WRITE: list[Write] = ["never", "on_eviction", "through"]


def evict(tiers: Tiers, *paths: str) -> Moves:
    """The plan in which these blocks leave the device; handles are 0, 1, ..."""
    built = plan()
    for handle, path in enumerate(paths):
        tiers.evicted(built, handle, label(path))
    return flushed(tiers, built)


def stored(*paths: str) -> list[Label]:
    return [label(path) for path in paths]


def came(tiers: Tiers, moves: Moves) -> None:
    """A launch was read: what it spilled is on the host."""
    tiers.payloads.came(spill.name for spill in moves.spill)


# Down ---------------------------------------------------------------------------------


def test_what_leaves_the_device_goes_to_the_host() -> None:
    tiers = Tiers(Payloads(3))
    assert evict(tiers, "ab", "a") == Moves(
        spill=(handle_spill(0, 0), handle_spill(1, 1))
    )
    assert tiers.find(keys("abc")) == on_host(1, 0)
    assert tiers.payloads.used("pool") == 2 and tiers.room_in_pool() == 3
    assert not tiers.has_disk and not tiers.under_way
    assert evict(tiers, "ab") == Moves()  # under another handle: it is there
    # Full, then: the least recently used leaves, children before parents.
    assert evict(tiers, "x", "y") == Moves(
        spill=(handle_spill(2, 0), handle_spill(3, 1)), drop=(0,)
    )
    assert tiers.find(keys("ab")) == on_host(1)
    tiers.use(keys("a"))
    assert evict(tiers, "z").drop == (2,)  # "x", for "a" was used since
    assert tiers.find(keys("a")) == on_host(1) and tiers.find(keys("x")) == []
    assert tiers.payloads.used("pool") == 3 and tiers.room_in_pool() == 3


def test_a_find_ends_at_the_first_gap() -> None:
    tiers = Tiers(Payloads(3), 9, stored=stored("abc", "a"))
    evict(tiers, "ab")
    assert tiers.find(keys("abcd")) == [*on_disk("a"), *on_host(0), *on_disk("abc")]
    assert tiers.find(keys("abcd")[1:]) == [*on_host(0), *on_disk("abc")]
    assert tiers.find(keys("xbc")) == []


def test_what_is_sealed_by_the_plan_in_which_it_leaves_is_read_where_it_lies() -> None:
    tiers, built = Tiers(Payloads(1)), plan()
    built.seal.append((2, 5, 7))  # slot 2, column 5 gets handle 7
    assert tiers.evicted(built, 7, label("a"))
    assert built.spill == [Spill(0, 2, 5, H)]


def test_what_leaves_the_host_goes_to_disk() -> None:
    tiers = Tiers(Payloads(1, window=2), 2)
    came(tiers, evict(tiers, "a"))
    moves = evict(tiers, "x")
    assert moves == Moves(spill=(handle_spill(1, 0),), save=(Save(0, label("a")),))
    assert (tiers.payloads.used("pool"), tiers.payloads.used("window")) == (1, 1)
    # On its way it cannot be had, and its payload is kept.
    assert tiers.place(key("a")) is None and tiers.is_coming(key("a"))
    assert tiers.find(keys("a")) == [] and tiers.under_way
    assert not tiers.has(Place("disk", label=label("a")))
    tiers.arrived(Arrived(done=(0,)))
    assert tiers.find(keys("a")) == on_disk("a") and not tiers.under_way
    assert tiers.has(Place("disk", label=label("a")))
    assert not tiers.is_coming(key("a")) and tiers.payloads.used("window") == 0
    assert tiers.counters.saved_blocks == 1 and tiers.has_chores
    assert flushed(tiers, plan()) == Moves(drop=(0,))
    assert not tiers.has_chores and tiers.holds_nothing()


def test_without_a_pool_what_leaves_the_device_goes_to_disk() -> None:
    tiers = Tiers(Payloads(0, window=3), 5)
    assert evict(tiers, "ab", "a") == Moves(
        spill=(handle_spill(0, 0), handle_spill(1, 1)),
        save=(Save(0, label("ab")), Save(1, label("a"))),
    )
    assert (tiers.payloads.used("window"), tiers.disk_used) == (2, 2)
    assert evict(tiers, "a") == Moves()  # it is on its way already
    tiers.arrived(Arrived(done=(1,)))
    assert tiers.find(keys("ab")) == on_disk("a")  # the other is not there yet
    tiers.arrived(Arrived(done=(0,)))
    assert tiers.find(keys("ab")) == on_disk("a", "ab")
    assert flushed(tiers, plan()).drop == (1, 0)


def test_what_is_on_disk_alone_comes_nearer_when_it_leaves_the_device() -> None:
    tiers = Tiers(Payloads(1, window=2), 2, stored=stored("a"))
    assert evict(tiers, "a") == Moves(spill=(handle_spill(0, 0),))
    assert tiers.place(key("a")) == Place("host", 0)
    # When it leaves the host it is on disk already.
    assert evict(tiers, "x") == Moves(spill=(handle_spill(1, 0),), drop=(0,))
    assert tiers.find(keys("a")) == on_disk("a")


def test_with_write_never_nothing_leaves_for_the_tiers() -> None:
    tiers, built = Tiers(Payloads(2, window=2), 2, write="never"), plan()
    tiers.named(0, label("a"))
    tiers.write_through(built, lambda key: 0)
    assert not tiers.evicted(built, 0, label("a"))
    assert flushed(tiers, built) == Moves() and not tiers.has_chores
    # What the host keeps for a swapped request does not go on to disk either.
    assert tiers.keep(built, 1, label("x")) and tiers.keep(built, 2, label("y"))
    assert tiers.keep(built, 3, label("z"))
    assert len(built.spill) == 3 and not built.save
    assert flushed(tiers, built).drop == (0,) and tiers.find(keys("x")) == []
    assert tiers.counters.skipped_saves == 0


def test_write_through_copies_a_block_once_it_has_a_name() -> None:
    tiers, device = Tiers(Payloads(4, window=4), 9, write="through"), {key("a"): 5}
    tiers.named(5, label("a"))
    tiers.named(6, label("ab"))  # evicted, or forgotten, before the next plan
    tiers.named(7, label("ac"))
    device[key("ac")] = 8  # has another handle by now
    assert tiers.has_chores
    built = plan()
    tiers.write_through(built, device.get)
    assert flushed(tiers, built) == Moves(
        spill=(handle_spill(0, 5),), save=(Save(0, label("a")),)
    )
    assert not tiers.has_chores
    assert tiers.find(keys("a")) == on_host(0)
    assert tiers.payloads.used("pool") == tiers.payloads.used("window") == 1
    tiers.arrived(Arrived(done=(0,)))
    assert tiers.payloads.used("window") == 0 and tiers.disk_used == 1
    # It stays on the host, and is not copied again by anybody.
    assert evict(tiers, "a") == Moves()
    built = plan()
    tiers.named(5, label("a"))
    tiers.write_through(built, device.get)
    assert flushed(tiers, built) == Moves()


def test_write_through_writes_what_no_pool_keeps() -> None:
    tiers, built = Tiers(Payloads(0, window=1), 9, write="through"), plan()
    tiers.named(5, label("a"))
    tiers.write_through(built, lambda key: 5)
    assert flushed(tiers, built) == Moves(
        spill=(handle_spill(0, 5),), save=(Save(0, label("a")),)
    )


@pytest.mark.parametrize("write", EVERY_WRITE)
def test_without_tiers_nothing_is_kept(write: Write) -> None:
    tiers, built = Tiers(Payloads(0), write=write), plan()
    tiers.named(0, label("a"))
    assert not tiers.has_chores
    tiers.write_through(built, lambda key: 0)
    assert not tiers.evicted(built, 0, label("a"))
    tiers.save_all([(1, label("x"))])
    assert not tiers.has_chores
    assert flushed(tiers, built) == Moves() and tiers.holds_nothing()
    assert tiers.counters.skipped_saves == 0


def test_a_full_window_is_not_asked() -> None:
    tiers = Tiers(Payloads(0, window=1), 5)
    built = plan()
    assert tiers.evicted(built, 0, label("a"))
    assert not tiers.evicted(built, 1, label("x"))
    assert tiers.counters.skipped_saves == 1
    assert flushed(tiers, built).save == (Save(0, label("a")),)
    assert len(built.spill) == 1 and not tiers.is_coming(key("x"))
    assert tiers.room_on_disk() == 0  # for now
    tiers.arrived(Arrived(done=(0,)))
    assert tiers.room_on_disk() == 1
    assert evict(tiers, "x").save == (Save(1, label("x")),)


def test_what_the_host_has_no_time_to_write_is_lost_with_what_follows_it() -> None:
    tiers = Tiers(Payloads(1, window=1), 5, stored=stored("ab"))
    evict(tiers, "a")
    busy = tiers.load(plan(), label("ab"), request=0)  # fills the window
    moves = evict(tiers, "x")
    assert moves == Moves(spill=(handle_spill(2, 0),), erase=erased("ab"), drop=(0,))
    assert tiers.counters.skipped_saves == 1
    assert tiers.counters.unreachable_blocks == 1
    # What is loaded by then is not cached any more.
    tiers.arrived(Arrived(done=(busy,)))
    tiers.unload(busy)
    assert flushed(tiers, plan()).drop == (busy,)
    assert tiers.find(keys("a")) == tiers.find(keys("ab")[1:]) == []


def test_a_payload_under_way_to_disk_is_not_written_twice_at_once() -> None:
    tiers = Tiers(Payloads(2, window=3), 1, write="through")
    first, second, third = plan(), plan(), plan()
    assert tiers.keep(first, 0, label("a"))
    assert flushed(tiers, first).save == (Save(0, label("a")),)
    assert tiers.keep(second, 1, label("x"))  # takes its place on disk
    moves = flushed(tiers, second)
    assert moves.save == (Save(1, label("x")),) and moves.erase == erased("a")
    assert tiers.keep(third, 0, label("a")) and flushed(tiers, third) == Moves()
    assert tiers.counters.skipped_saves == 1
    assert tiers.find(keys("a")) == on_host(0)


# A full disk --------------------------------------------------------------------------


def test_a_full_disk_forgets_what_was_not_used_longest() -> None:
    tiers = Tiers(Payloads(0, window=9), 3, stored=stored("x", "ab", "a"))
    assert tiers.room_on_disk() == 3
    tiers.use(keys("x"))
    moves = evict(tiers, "y")
    assert moves.erase == erased("ab") and moves.save == (Save(0, label("y")),)
    assert evict(tiers, "z").erase == erased("a")
    assert evict(tiers, "w").erase == erased("x")
    assert tiers.disk_used == 3 and tiers.find(keys("x")) == []


def test_what_is_stored_beyond_the_room_is_erased_at_once() -> None:
    paths = ["abc", "x", "ab", "a", "y"]  # the longest unused first
    tiers = Tiers(Payloads(0, window=1), 3, stored=stored(*paths))
    assert tiers.disk_used == 3
    assert flushed(tiers, plan()).erase == erased("abc", "x")
    assert tiers.find(keys("abc")) == on_disk("a", "ab")
    none = Tiers(Payloads(4), stored=stored(*paths))
    assert none.disk_used == 0 and flushed(none, plan()) == Moves()


def test_pinned_blocks_leave_no_tier() -> None:
    tiers = Tiers(Payloads(1, window=4), 2, stored=stored("x", "y"))
    evict(tiers, "a")
    for path in "ax":
        tiers.pin(keys(path))
    assert (tiers.room_in_pool(), tiers.room_on_disk()) == (0, 1)
    built = plan()
    assert tiers.evicted(built, 0, label("b"))  # past the host
    assert flushed(tiers, built) == Moves(
        spill=(handle_spill(1, 0),),
        save=(Save(1, label("b")),),
        erase=erased("y"),
    )
    tiers.pin(keys("b"))
    assert tiers.room_on_disk() == 0
    assert not tiers.evicted(built, 0, label("c"))
    assert tiers.counters.skipped_saves == 1
    assert not tiers.holds_nothing()
    tiers.arrived(Arrived(done=(1,)))
    for path in "axb":
        tiers.unpin(keys(path))
    assert (tiers.room_in_pool(), tiers.room_on_disk()) == (1, 2)
    flushed(tiers, plan())
    assert tiers.holds_nothing()


def test_what_is_written_again_is_not_erased() -> None:
    tiers, built = Tiers(Payloads(0, window=3), 1, stored=stored("a")), plan()
    assert tiers.evicted(built, 0, label("x"))  # erases "a"
    assert tiers.evicted(built, 1, label("a"))  # erases "x", writes "a" anew
    assert flushed(tiers, built) == Moves(
        spill=(handle_spill(0, 0), handle_spill(1, 1)),
        save=(Save(0, label("x")), Save(1, label("a"))),
        erase=(*erased("a"), *erased("x", after=1)),
    )
    assert tiers.disk_used == 1
    tiers.arrived(Arrived(done=(0,)))
    assert tiers.find(keys("x")) == tiers.find(keys("a")) == []
    tiers.arrived(Arrived(done=(1,)))
    assert tiers.find(keys("x")) == [] and tiers.find(keys("a")) == on_disk("a")


def test_a_file_is_there_once_the_last_order_to_write_it_is_done() -> None:
    tiers = Tiers(Payloads(0, window=3), 1)
    assert evict(tiers, "a").save == (Save(0, label("a")),)
    assert evict(tiers, "x").erase == erased("a")
    assert not tiers.is_coming(key("a"))
    moves = evict(tiers, "a")
    assert moves.save == (Save(2, label("a")),) and moves.erase == erased("x")
    # The first file is there, and then erased by the second plan.
    tiers.arrived(Arrived(done=(0, 1)))
    assert tiers.place(key("a")) is None and tiers.is_coming(key("a"))
    tiers.arrived(Arrived(done=(2,)))
    assert tiers.find(keys("a")) == on_disk("a")


def test_a_file_that_is_written_again_outlives_the_failure_of_the_first_try() -> None:
    tiers = Tiers(Payloads(0, window=3), 1)
    for path in ("a", "x", "a"):
        evict(tiers, path)
    tiers.arrived(Arrived(failed=(0,), done=(1,)))
    assert tiers.place(key("a")) is None and tiers.is_coming(key("a"))
    tiers.arrived(Arrived(done=(2,)))
    assert tiers.find(keys("a")) == on_disk("a") and tiers.disk_used == 1


def test_a_file_that_could_not_be_written_again_is_found_or_erased() -> None:
    tiers, built = Tiers(Payloads(0, window=3), 1, stored=stored("a")), plan()
    tiers.evicted(built, 0, label("x"))
    tiers.evicted(built, 1, label("a"))
    assert flushed(tiers, built).erase == (*erased("a"), *erased("x", after=1))
    tiers.arrived(Arrived(done=(0,), failed=(1,)))
    found = tiers.find(keys("a")) == on_disk("a")
    assert found != (erased("a") == flushed(tiers, plan()).erase)


# What fails ---------------------------------------------------------------------------


def test_a_save_that_failed_is_a_miss() -> None:
    tiers = Tiers(Payloads(0, window=2), 5)
    evict(tiers, "a")
    tiers.arrived(Arrived(failed=(0,)))
    assert tiers.counters.failed_saves == 1 and tiers.counters.saved_blocks == 0
    assert tiers.find(keys("a")) == [] and not tiers.is_coming(key("a"))
    assert (tiers.disk_used, tiers.payloads.used("window")) == (0, 0)
    assert not tiers.under_way
    assert but_erasing(flushed(tiers, plan()), label("a")) == Moves(drop=(0,))
    assert evict(tiers, "a").save == (Save(1, label("a")),)  # it is tried again


def test_a_save_that_failed_leaves_the_copy_on_the_host() -> None:
    tiers, built = Tiers(Payloads(1, window=2), 5, write="through"), plan()
    tiers.keep(built, 0, label("a"))
    flushed(tiers, built)
    tiers.arrived(Arrived(failed=(0,)))
    assert tiers.find(keys("a")) == on_host(0)
    assert (tiers.disk_used, tiers.payloads.used("window")) == (0, 0)
    assert but_erasing(flushed(tiers, plan()), label("a")) == Moves()
    assert evict(tiers, "x").save == (Save(0, label("a")), Save(1, label("x")))


def test_a_load_that_failed_is_a_miss_and_leaves_no_payload() -> None:
    tiers, built = Tiers(Payloads(1, window=2), 5, stored=stored("a", "x")), plan()
    assert tiers.load(built, label("a"), request=3) == 0
    assert flushed(tiers, built) == Moves(load=(Load(0, label("a")),))
    assert tiers.payloads.used("window") == 1 and tiers.under_way
    assert not tiers.payloads.is_here(0) and tiers.payloads.holds(0)
    tiers.arrived(Arrived(failed=(0,)))
    assert tiers.counters.failed_loads == 1 and tiers.counters.loaded_blocks == 0
    assert not tiers.payloads.holds(0) and tiers.payloads.used("window") == 0
    assert tiers.find(keys("a")) == [] and tiers.disk_used == 1
    tiers.unload(0)  # who asked for it lets go of it
    moves = flushed(tiers, plan())
    assert but_erasing(moves, label("a")) == Moves()  # it never came
    assert tiers.holds_nothing()


def test_a_load_that_failed_after_it_was_given_up_leaves_nothing() -> None:
    tiers, built = Tiers(Payloads(1, window=1), 5, stored=stored("a")), plan()
    name = tiers.load(built, label("a"), request=3)
    tiers.unload(name)
    assert not tiers.can_load(1)
    tiers.arrived(Arrived(failed=(name,)))
    assert tiers.can_load(1) and not tiers.can_load(2)
    assert but_erasing(flushed(tiers, plan()), label("a")) == Moves()
    assert tiers.holds_nothing()


# Behind a block that is gone ----------------------------------------------------------


def family() -> tuple[Tiers, set[bytes]]:
    """On the device "a"; on the host "ab"; on disk "abc", "abcd" and "ad"; and "xy",
    whose parent is nobody's business."""
    device = {key("a")}
    files = stored("abcd", "abc", "ad", "xy")
    tiers = Tiers(
        Payloads(2, window=1),
        9,
        write="never",
        on_device=device.__contains__,
        stored=files,
    )
    tiers.keep(plan(), 7, label("ab"))
    return tiers, device


GONE = {*erased("abc", "abcd", "ad")}


def check_only_xy_is_left(tiers: Tiers) -> None:
    moves = flushed(tiers, plan())
    assert moves.drop == (0,) and set(moves.erase) == GONE and len(moves.erase) == 3
    assert len(tiers.host) == 0 and tiers.disk_used == 1
    assert tiers.counters.unreachable_blocks == 4


def test_what_follows_a_block_that_is_gone_everywhere_goes_too() -> None:
    tiers, device = family()
    device.clear()
    assert not tiers.evicted(plan(), 8, label("a"))
    check_only_xy_is_left(tiers)


@pytest.mark.parametrize("where", ["device", "host", "disk"])
def test_it_stays_as_long_as_the_block_is_anywhere(where: str) -> None:
    tiers, device = family()
    if where == "host":
        tiers.keep(plan(), 8, label("a"))
    if where == "disk":
        tiers.arrived(Arrived(found=(label("a"),)))
    if where != "device":
        device.clear()
    tiers.left(key("a"))
    assert flushed(tiers, plan()) == Moves()
    assert len(tiers.host) == 1 + (where == "host")
    assert tiers.disk_used == 4 + (where == "disk")
    assert tiers.counters.unreachable_blocks == 0


def test_it_goes_when_another_engine_removes_the_block() -> None:
    tiers, device = family()
    tiers.arrived(Arrived(found=(label("a"),)))
    device.clear()
    tiers.arrived(Arrived(gone=(key("a"), key("q"))))
    check_only_xy_is_left(tiers)


@pytest.mark.parametrize("how", ["load", "save"])
def test_it_goes_when_the_block_cannot_be_read_or_written(how: str) -> None:
    tiers, device = family()
    built = plan()
    if how == "load":
        tiers.arrived(Arrived(found=(label("a"),)))
        name = tiers.load(built, label("a"), request=0)
    else:
        assert tiers.keep(built, 8, label("a"), to_disk=True)
        name = built.save[0].name
    flushed(tiers, built)
    device.clear()
    tiers.left(key("a"))
    assert tiers.counters.unreachable_blocks == 0  # it is there, or may come
    tiers.arrived(Arrived(failed=(name,)))
    moves = but_erasing(flushed(tiers, plan()), label("a"))
    assert 0 in moves.drop and set(moves.erase) == GONE
    assert len(tiers.host) == 0 and tiers.disk_used == 1


def test_it_goes_when_a_full_disk_forgets_the_block() -> None:
    device: set[bytes] = set()
    tiers = Tiers(
        Payloads(1, window=2), 1, on_device=device.__contains__, stored=stored("a")
    )
    tiers.keep(plan(), 7, label("ab"))
    built = plan()
    assert tiers.keep(built, 8, label("x"), to_disk=True)
    moves = flushed(tiers, built)
    assert moves.erase == erased("a") and moves.drop == (0,)
    assert tiers.counters.unreachable_blocks == 1 and len(tiers.host) == 0


def test_a_block_is_not_written_where_it_takes_the_place_of_its_parent() -> None:
    # "a" is on disk alone, "ab" on the host alone, and the disk has room for one.
    tiers = Tiers(Payloads(1, window=2), 1, stored=stored("a"))
    tiers.keep(plan(), 7, label("ab"))
    moves = evict(tiers, "x")  # takes its place on the host
    tiers.arrived(Arrived(done=tuple(save.name for save in moves.save)))
    assert len(tiers.find(keys("ab"))) == tiers.disk_used, "a file that nobody finds"


def test_a_payload_that_is_to_be_written_is_not_dropped() -> None:
    tiers = Tiers(Payloads(1, window=2), 1, stored=stored("a"))
    tiers.keep(plan(), 7, label("ab"))
    tiers.save_all([])
    built = plan()
    tiers.write_through(built, lambda key: None)
    moves = flushed(tiers, built)
    assert not {save.name for save in moves.save} & set(moves.drop)


# Cleared, saved, shared ---------------------------------------------------------------


def test_clear_forgets_every_block() -> None:
    tiers = Tiers(Payloads(2, window=2), 5, write="through", stored=stored("x"))
    built = plan()
    tiers.keep(built, 0, label("a"))
    flushed(tiers, built)
    tiers.named(4, label("z"))
    tiers.save_all([(9, label("y"))])
    assert tiers.is_coming(key("a"))
    tiers.clear()
    assert tiers.has_chores and not tiers.is_coming(key("a"))
    built = plan()
    tiers.write_through(built, {key("z"): 4, key("y"): 9}.get)
    moves = flushed(tiers, built)
    assert set(moves.erase) == {*erased("a", "x")} and len(moves.erase) == 2
    assert not (moves.drop or moves.spill or moves.save)  # 0 is being written
    assert tiers.find(keys("a")) == tiers.find(keys("x")) == []
    assert (tiers.disk_used, tiers.payloads.used("pool")) == (0, 0)
    tiers.arrived(Arrived(done=(0,)))
    assert tiers.find(keys("a")) == []
    assert flushed(tiers, plan()) == Moves(drop=(0,)) and tiers.holds_nothing()


def test_cleared_blocks_can_be_named_and_written_again() -> None:
    tiers = Tiers(Payloads(0, window=2), 5)
    evict(tiers, "a")
    tiers.clear()
    assert evict(tiers, "a") == Moves(
        spill=(handle_spill(1, 0),), save=(Save(1, label("a")),), erase=erased("a")
    )
    tiers.arrived(Arrived(done=(0, 1)))
    assert tiers.find(keys("a")) == on_disk("a")


def test_all_are_saved_as_the_window_has_room() -> None:
    tiers = Tiers(Payloads(3, window=2), 9, write="never", stored=stored("x"))
    for handle, path in enumerate(["a", "ab", "x"]):
        tiers.keep(plan(), handle, label(path))  # payloads 0, 1 and 2
    flushed(tiers, plan())
    device = {key("abcd"): 14, key("y"): 13, key("abc"): 11, key("x"): 12}
    paths = ["abcd", "y", "abc", "x"]
    tiers.save_all([(device[key(path)], label(path)) for path in paths])
    del device[key("abcd")]  # evicted before its turn
    written: list[Save] = []
    spilled: dict[int, int] = {}  # handle of each payload
    plans = 0
    while tiers.has_chores:
        plans += 1
        built = plan()
        tiers.write_through(built, device.get)
        moves = flushed(tiers, built)
        assert len(moves.save) <= 2 and not moves.erase
        assert {s.name for s in moves.spill} <= {s.name for s in moves.save}
        written += moves.save
        spilled |= {spill.name: spill.handle for spill in moves.spill}
        assert not tiers.has_chores  # nothing can be done until some are written
        tiers.arrived(Arrived(done=tuple(save.name for save in moves.save)))
        flushed(tiers, plan())
    assert plans in (2, 3)
    # What is on the host is written from there, what is on disk is there.
    names = {save.label: save.name for save in written}
    assert len(written) == 4
    assert names.keys() == {label(path) for path in ("a", "ab", "y", "abc")}
    assert (names[label("a")], names[label("ab")]) == (0, 1)
    assert spilled == {names[label("y")]: 13, names[label("abc")]: 11}
    assert tiers.find(keys("ab")) == on_host(0, 1) and tiers.disk_used == 5
    assert tiers.holds_nothing() and tiers.payloads.used("pool") == 3


def test_of_all_that_was_cached_a_full_disk_keeps_what_was_used_last() -> None:
    files = stored("x", "y", "z")  # the longest unused first
    tiers = Tiers(Payloads(1, window=9), 3, write="never", stored=files)
    tiers.keep(plan(), 7, label("h"))  # cached on the host alone, unused for longer
    device = {"b": 1, "a": 2, "c": 3, "x": 4}
    tiers.save_all([(handle, label(path)) for path, handle in device.items()])
    built = plan()
    tiers.write_through(built, {key(path): h for path, h in device.items()}.get)
    moves = flushed(tiers, built)
    assert [save.label for save in moves.save] == [label("a"), label("c")]
    assert moves.erase == (*erased("y"), *erased("z", after=1))  # not "x": used last
    tiers.arrived(Arrived(done=tuple(save.name for save in moves.save)))
    assert [len(tiers.find(keys(path))) for path in "bacx"] == [0, 1, 1, 1]


def test_of_a_chain_that_the_disk_cannot_hold_whole_its_first_blocks_are_saved() -> (
    None
):
    tiers = Tiers(Payloads(2, window=1), 1, write="through")
    for handle, path in enumerate(["a", "ab"]):
        tiers.named(handle, label(path))
    built = plan()
    tiers.write_through(built, {key("a"): 0, key("ab"): 1}.get)
    assert [save.label for save in built.save] == [label("a")]  # then it was full
    tiers.arrived(Arrived(done=(0,)))
    tiers.save_all([])
    built = plan()
    tiers.write_through(built, lambda key: None)
    tiers.arrived(Arrived(done=tuple(save.name for save in built.save)))
    again = Tiers(Payloads(0), 1, stored=tiers.disk.labels())
    assert again.find(keys("ab")) == on_disk("a")


def test_blocks_of_other_engines_are_found_and_lost() -> None:
    tiers = Tiers(Payloads(0, window=2), 3, stored=stored("a"))
    tiers.arrived(Arrived(found=(label("ab"), label("a"))))
    assert tiers.find(keys("ab")) == on_disk("a", "ab") and tiers.disk_used == 2
    tiers.arrived(Arrived(gone=(key("ab"), key("q"))))
    assert tiers.find(keys("ab")) == on_disk("a")
    assert flushed(tiers, plan()) == Moves()  # it is gone: nothing to erase
    # The directory is bounded by all: the longest unused make room.
    tiers.arrived(Arrived(found=(label("x"), label("y"), label("z"))))
    assert flushed(tiers, plan()).erase == erased("a") and tiers.disk_used == 3


def test_what_is_being_written_is_not_lost_to_a_late_look_at_the_directory() -> None:
    tiers = Tiers(Payloads(0, window=2), 3)
    evict(tiers, "a")
    tiers.arrived(Arrived(gone=(key("a"),)))
    assert tiers.is_coming(key("a"))
    tiers.arrived(Arrived(done=(0,), gone=(key("a"),)))
    assert tiers.find(keys("a")) == []  # it was there, and is gone


# Up -----------------------------------------------------------------------------------


def test_what_is_loaded_is_kept_on_the_host_while_that_has_room() -> None:
    tiers, built = Tiers(Payloads(1, window=3), 5, stored=stored("a", "x")), plan()
    names = [tiers.load(built, label(path), request=4) for path in "ax"]
    assert built.load == [Load(0, label("a")), Load(1, label("x"))]
    assert tiers.can_load(1) and not tiers.can_load(2)
    assert tiers.payloads.take_copied() == [(4, 0), (4, 1)]
    tiers.arrived(Arrived(done=(0, 1)))
    assert tiers.counters.loaded_blocks == 2
    assert all(map(tiers.payloads.is_here, names))
    assert [tiers.place(key(path)) for path in "ax"] == [*on_host(0), *on_disk("x")]
    assert (tiers.payloads.used("pool"), tiers.payloads.used("window")) == (1, 2)
    for name in names:
        tiers.unload(name)  # fetched by this plan
    assert flushed(tiers, built).drop == (1,)
    assert (tiers.payloads.used("pool"), tiers.payloads.used("window")) == (1, 0)


def test_what_is_not_wanted_any_more_is_held_until_it_has_come() -> None:
    tiers, built = Tiers(Payloads(0, window=1), 5, stored=stored("a")), plan()
    name = tiers.load(built, label("a"), request=4)
    tiers.unload(name)
    assert not flushed(tiers, built).drop and not tiers.can_load(1)
    tiers.arrived(Arrived(done=(name,)))
    assert tiers.can_load(1) and flushed(tiers, plan()).drop == (name,)
    assert tiers.find(keys("a")) == on_disk("a")


# Columns of swapped requests ----------------------------------------------------------


def test_a_private_column_goes_to_disk_and_is_erased_once_it_is_not_needed() -> None:
    tiers, built = Tiers(Payloads(0, window=2), 1, stored=stored("a")), plan()
    name = tiers.swap_column(built, 2, 5, request=4)
    moves = flushed(tiers, built)
    assert moves.spill == (Spill(name, 2, 5, H),)
    ((saved, mine),) = moves.save
    assert saved == name and moves.erase == erased("a")
    assert tiers.payloads.take_copied() == [(4, name)]
    assert tiers.swapped(name) == "coming" and not tiers.has(Place("disk", label=mine))
    assert (tiers.disk_used, tiers.room_on_disk()) == (1, 0)
    assert not tiers.holds_nothing()
    tiers.arrived(Arrived(done=(name,)))
    there = Place("disk", label=mine)
    assert tiers.swapped(name) == there and tiers.has(there)
    assert tiers.room_on_disk() == 0  # nobody else's
    assert flushed(tiers, plan()).drop == (name,)
    tiers.forget_swapped(name)
    tiers.forget_swapped(name)
    assert tiers.swapped(name) == "lost" and not tiers.has(there)
    assert flushed(tiers, plan()) == Moves(erase=(Erase(mine),))
    assert tiers.disk_used == 0 and tiers.holds_nothing()


@pytest.mark.parametrize("outcome", [Arrived(done=(0,)), Arrived(failed=(0,))])
def test_a_private_column_may_be_forgotten_while_it_is_written(
    outcome: Arrived,
) -> None:
    tiers, built = Tiers(Payloads(0, window=1), 1), plan()
    name = tiers.swap_column(built, 2, 5, request=4)
    flushed(tiers, built)
    tiers.forget_swapped(name)
    assert flushed(tiers, plan()) == Moves(erase=(Erase(built.save[0].label),))
    assert not tiers.holds_nothing()  # it is read from while it is written
    tiers.arrived(outcome)
    assert tiers.swapped(name) == "lost" and tiers.disk_used == 0
    moves = but_erasing(flushed(tiers, plan()), built.save[0].label)
    assert moves == Moves(drop=(name,)) and tiers.holds_nothing()


@pytest.mark.parametrize("way", ["save", "load"])
def test_a_private_column_that_cannot_be_written_or_read_is_lost(way: str) -> None:
    tiers, built = Tiers(Payloads(1, window=2), 3), plan()
    name = tiers.swap_column(built, 2, 5, request=4)
    failed = name
    if way == "load":
        tiers.arrived(Arrived(done=(name,)))
        failed = tiers.load(built, built.save[0].label, request=4)
    tiers.arrived(Arrived(failed=(failed,)))
    assert tiers.swapped(name) == "lost" and tiers.disk_used == 0
    assert (tiers.counters.failed_saves, tiers.counters.failed_loads) == (
        (1, 0) if way == "save" else (0, 1)
    )
    assert flushed(tiers, plan()).drop == (name,) and tiers.holds_nothing()


def test_private_columns_are_never_cached() -> None:
    tiers, built = Tiers(Payloads(1, window=2), 3), plan()
    name = tiers.swap_column(built, 2, 5, request=4)
    tiers.arrived(Arrived(done=(name,)))
    again = tiers.load(built, built.save[0].label, request=4)
    tiers.arrived(Arrived(done=(again,)))
    assert len(tiers.host) == len(tiers.disk) == 0
    assert tiers.payloads.used("pool") == 0
    tiers.unload(again)
    assert set(flushed(tiers, built).drop) == {name, again}


def test_room_that_was_promised_is_given_to_nobody_else() -> None:
    tiers, built = Tiers(Payloads(2)), plan()
    tiers.payloads.promised = 1
    assert tiers.keep(built, 0, label("x"), request=5)
    assert tiers.room_in_pool() == 1
    assert tiers.keep(built, 1, label("a"), request=6, promised=True)
    assert tiers.payloads.promised == 0 and tiers.payloads.used("pool") == 2
    assert flushed(tiers, built).drop == ()
    assert tiers.payloads.take_copied() == [(5, 0), (6, 1)]
    tiers.payloads.promised = 2
    assert tiers.room_in_pool() == 0
    assert not tiers.keep(built, 2, label("y"))
    # It is given back where the block is there already.
    assert tiers.keep(built, 3, label("a"), promised=True)
    assert tiers.payloads.promised == 1 and len(built.spill) == 2
    tiers.make_room(built, 1)
    assert tiers.payloads.free("pool") == 1 and flushed(tiers, built).drop == (0, 1)
