"""What waiting requests have asked for, by hand: loaded, fetched, given up, called
off."""

from __future__ import annotations

import math

import pytest

from jaxserve.moves import Arrived, Fetch, Load, Moves
from jaxserve.scheduling.incoming import Coming, Incoming
from jaxserve.scheduling.payloads import Payloads
from jaxserve.scheduling.plan_builder import PlanBuilder
from jaxserve.scheduling.tiers import Place, Tiers
from tests.scheduling.labels import (
    but_erasing,
    erased,
    key,
    keys,
    label,
    on_disk,
    on_host,
    plan,
)

TIMEOUT_S = 10.0


class Below:
    """Tiers with a window of 3, and what is on its way up from them.

    Args:
      host: paths of blocks there, as payloads 0, 1, ... disk: of files.
    """

    def __init__(self, host: str = "", disk: str = "", *, pool: int = 0):
        stored = [label(path) for path in reversed(disk.split())]
        self.tiers = Tiers(
            Payloads(pool + len(host.split()), window=3),
            9,
            write="never",
            stored=stored,
        )
        self.incoming = Incoming(self.tiers, TIMEOUT_S)
        for handle, path in enumerate(host.split()):
            self.tiers.keep(plan(), handle, label(path))

    def ask(
        self,
        built: PlanBuilder,
        index: int,
        path: str,
        first: int = 0,
        now_s: float = 0.0,
        *,
        swapped: bool = False,
    ) -> bool:
        chain = keys(path)
        places = self.tiers.find(chain[first:])
        assert len(places) == len(path) - first
        pinned = [] if swapped else chain
        return self.incoming.ask(
            built, index, first, places, pinned, now_s, swapped=swapped
        )

    def came(self, *names: int) -> None:
        """A launch was read: its spills are on the host."""
        self.tiers.payloads.came(names)

    def arrived(self, arrived: Arrived) -> None:
        self.tiers.arrived(arrived)
        self.incoming.arrived(arrived)

    def advance(self, now_s: float = 1.0) -> Moves:
        """What a plan moves in which nobody asks."""
        return self.flushed(plan(), now_s)

    def flushed(self, built: PlanBuilder, now_s: float = 1.0) -> Moves:
        self.incoming.advance(built, now_s)
        self.incoming.flush(built)
        self.tiers.flush(built)
        return built.moves

    def of(self, index: int) -> Coming:
        coming = self.incoming.get(index)
        assert coming is not None
        return coming

    def check_nothing_is_left(self, host: int = 0, disk: int = 0) -> None:
        """But these cached blocks."""
        assert self.incoming.holds_nothing() and self.tiers.holds_nothing()
        assert (len(self.tiers.host), len(self.tiers.disk)) == (host, disk)
        assert self.tiers.payloads.used("pool") == host
        assert not self.tiers.under_way


# All goes well ------------------------------------------------------------------------


def test_what_is_on_disk_is_loaded_and_then_fetched_together() -> None:
    below, built = Below(disk="a ab"), plan()
    assert below.ask(built, 5, "ab", now_s=1.0)
    moves = below.flushed(built)
    assert moves == Moves(load=(Load(0, label("a")), Load(1, label("ab"))))
    assert below.incoming.next_timeout_s == 11.0
    assert below.of(5).waits and not below.of(5).arrived
    below.arrived(Arrived(done=(1,)))
    assert below.advance() == Moves()  # not one by one
    below.arrived(Arrived(done=(0,)))
    # Fetched in the order of columns, and dropped then: there is no pool.
    assert below.advance() == Moves(fetch=(Fetch(0, 0, (0, 1)),), drop=(0, 1))
    assert below.of(5).waits and below.incoming.next_timeout_s == 11.0
    assert below.incoming.owner(0) == 5 and below.incoming.owner(1) is None
    assert below.advance() == Moves()
    below.arrived(Arrived(fetches=(0,)))
    assert below.of(5).arrived and not below.of(5).waits
    assert below.incoming.next_timeout_s == math.inf
    assert below.advance(now_s=99.0) == Moves() and below.incoming.timeouts == 0
    assert not below.incoming.holds_nothing()
    below.incoming.drop(5, [Fetch(0, 0, (0, 1))])  # it is given to the request
    assert below.incoming.get(5) is None and not below.incoming.has_cancelled
    below.check_nothing_is_left(disk=2)


def test_what_is_on_the_host_is_fetched_at_once() -> None:
    below, built = Below(host="a ab"), plan()
    below.came(0, 1)
    assert below.ask(built, 5, "ab", first=1)
    assert below.flushed(built) == Moves(fetch=(Fetch(0, 1, (1,)),))
    assert (below.of(5).first, below.of(5).end) == (1, 2)
    below.arrived(Arrived(fetches=(0,)))
    assert below.of(5).arrived
    below.incoming.drop(5, below.of(5).fetches)
    assert below.advance() == Moves()
    below.check_nothing_is_left(host=2)


def test_nothing_is_fetched_before_the_launch_that_copied_it_is_read() -> None:
    below, built = Below(host="a ab"), plan()
    assert below.ask(built, 5, "ab")
    assert below.flushed(built) == Moves()
    below.came(0)
    assert below.advance() == Moves()
    below.came(1)
    assert below.advance() == Moves(fetch=(Fetch(0, 0, (0, 1)),))


def test_what_is_on_the_host_waits_for_what_is_loaded() -> None:
    below, built = Below(host="a abc", disk="ab abcd", pool=1), plan()
    below.came(0, 1)
    assert below.ask(built, 5, "abcd")
    assert below.of(5).places == [
        *on_host(0),
        *on_disk("ab"),
        *on_host(1),
        *on_disk("abcd"),
    ]
    assert [below.of(5).from_disk(start) for start in range(4)] == [2, 2, 1, 1]
    moves = below.flushed(built)
    assert moves == Moves(load=(Load(2, label("ab")), Load(3, label("abcd"))))
    below.arrived(Arrived(done=(2, 3)))
    # One of those that were loaded stays in the pool, which had room for it.
    assert below.advance() == Moves(fetch=(Fetch(0, 0, (0, 2, 1, 3)),), drop=(3,))
    assert below.tiers.place(key("ab")) == Place("host", 2)


def test_each_fetch_has_its_own_number_and_waits_for_none() -> None:
    below, built = Below(host="a x"), plan()
    below.came(0, 1)
    assert below.ask(built, 5, "a") and below.ask(built, 3, "x")
    assert built.fetch == [Fetch(0, 0, (0,)), Fetch(1, 0, (1,))]
    below.arrived(Arrived(fetches=(1,)))
    assert below.of(3).arrived and below.of(5).waits
    below.arrived(Arrived(fetches=(0,)))
    assert below.of(5).arrived


def test_what_is_asked_for_stays_in_the_tiers_until_it_is_fetched() -> None:
    below, built = Below(host="a", disk="ab"), plan()
    below.ask(built, 5, "ab")
    tiers = below.tiers
    assert (tiers.room_in_pool(), tiers.disk.evictable) == (0, 0)
    below.came(0)
    below.arrived(Arrived(done=(1,)))
    assert (tiers.room_in_pool(), tiers.disk.evictable) == (0, 0)
    assert below.advance().fetch == (Fetch(0, 0, (0, 1)),)
    assert (tiers.room_in_pool(), tiers.disk.evictable) == (1, 1)


# The window ---------------------------------------------------------------------------


def test_all_is_loaded_at_once_or_nothing() -> None:
    below, built = Below(disk="a ab x xy"), plan()  # a window of 3
    assert below.ask(built, 0, "ab")
    assert not below.ask(built, 1, "xy")
    assert len(built.load) == 2 and below.of(1).given_up
    assert not below.of(1).waits and not below.of(1).arrived
    below.arrived(Arrived(done=(0, 1)))
    moves = below.flushed(built)  # there is room now, but it is computed instead
    assert [load.label for load in moves.load] == [label("a"), label("ab")]
    assert below.tiers.disk.evictable == 4  # nothing is pinned for either
    assert below.incoming.timeouts == 0


def test_one_that_fits_loads_beside_others() -> None:
    below, built = Below(disk="a ab x"), plan()
    assert below.ask(built, 0, "ab") and below.ask(built, 1, "x")
    assert len(built.load) == 3


def test_a_swapped_request_waits_its_turn_to_load() -> None:
    below, built = Below(disk="a ab x xy"), plan()
    assert below.ask(built, 0, "ab", now_s=1.0)
    assert below.ask(built, 1, "xy", now_s=2.0, swapped=True)
    assert len(below.flushed(built).load) == 2
    below.arrived(Arrived(done=(0, 1)))
    assert below.tiers.payloads.free("window") == 1
    # The first one's payloads are fetched, and leave room in the same plan.
    moves = below.advance()
    assert moves.fetch == (Fetch(0, 0, (0, 1)),)
    assert moves.load == (Load(2, label("x")), Load(3, label("xy")))
    assert below.incoming.next_timeout_s == 11.0
    below.arrived(Arrived(fetches=(0,)))
    assert below.incoming.next_timeout_s == 12.0


def test_a_swapped_request_gives_up_its_turn_in_time() -> None:
    below, built = Below(disk="a ab x xy"), plan()
    below.ask(built, 0, "ab", now_s=1.0)
    below.ask(built, 1, "xy", now_s=0.0, swapped=True)
    below.flushed(built)
    assert len(below.advance(now_s=10.0).load) == 0
    assert below.of(1).given_up and below.incoming.timeouts == 1
    below.arrived(Arrived(done=(0, 1)))
    assert not below.advance(now_s=10.5).load


# What does not come -------------------------------------------------------------------


def test_who_has_waited_too_long_for_a_load_gives_up() -> None:
    below, built = Below(disk="a ab"), plan()
    below.ask(built, 5, "ab", now_s=1.0)
    below.flushed(built)
    below.arrived(Arrived(done=(0,)))
    assert below.advance(now_s=10.9) == Moves() and below.of(5).waits
    # What has come is dropped; what is being loaded holds its place until it has.
    assert below.advance(now_s=11.0) == Moves(drop=(0,))
    assert below.of(5).given_up and below.incoming.timeouts == 1
    assert below.incoming.next_timeout_s == math.inf
    assert below.tiers.payloads.used("window") == 1
    assert below.tiers.disk.evictable == 2
    assert below.advance(now_s=12.0) == Moves() and below.incoming.timeouts == 1
    below.arrived(Arrived(done=(1,)))
    assert below.tiers.payloads.used("window") == 0
    assert below.advance(now_s=13.0) == Moves(drop=(1,))
    assert not below.incoming.holds_nothing()  # it is not to ask again
    below.incoming.drop(5)
    below.check_nothing_is_left(disk=2)


def test_who_has_waited_too_long_for_a_fetch_calls_it_off() -> None:
    below, built = Below(host="a"), plan()
    below.came(0)
    below.ask(built, 5, "a", now_s=1.0)
    assert below.flushed(built).fetch == (Fetch(0, 0, (0,)),)
    assert below.advance(now_s=11.0) == Moves(cancel=(0,))
    assert below.of(5).given_up and below.incoming.timeouts == 1
    assert below.incoming.owner(0) is None
    below.arrived(Arrived(fetches=(0,)))  # too late
    assert not below.of(5).arrived and below.advance(now_s=12.0) == Moves()
    below.incoming.drop(5)
    below.check_nothing_is_left(host=1)


def test_a_swapped_request_waits_for_what_is_on_its_way_down() -> None:
    below = Below()
    below.incoming.hold(5, 1.0)
    below.incoming.hold(5, 7.0)  # since the first time
    assert below.of(5).waits and not below.of(5).places
    assert below.incoming.next_timeout_s == 11.0
    assert below.advance(now_s=10.0) == Moves() and below.of(5).waits
    assert below.advance(now_s=11.0) == Moves() and below.of(5).given_up
    assert below.incoming.timeouts == 1
    below.incoming.drop(5)
    below.check_nothing_is_left()


def test_after_a_failed_load_those_before_it_are_fetched() -> None:
    below, built = Below(disk="a ab abc"), plan()
    below.ask(built, 5, "abc")
    assert len(below.flushed(built).load) == 3
    below.arrived(Arrived(failed=(1,)))
    assert below.of(5).waits and below.of(5).end == 1
    # "abc" cannot be found any more, and is held until it has come.
    moves = but_erasing(below.advance(), label("ab"))
    assert moves == Moves(erase=erased("abc"))
    assert below.tiers.payloads.used("window") == 2
    below.arrived(Arrived(done=(0, 2)))
    assert below.advance() == Moves(fetch=(Fetch(0, 0, (0,)),), drop=(2, 0))
    below.arrived(Arrived(fetches=(0,)))
    assert below.of(5).arrived and below.of(5).places == on_disk("a")
    below.incoming.drop(5, below.of(5).fetches)
    below.check_nothing_is_left(disk=1)


@pytest.mark.parametrize("first", [0, 1])
def test_after_a_failure_of_the_first_nothing_is_fetched(first: int) -> None:
    below, built = Below(disk="a ab"), plan()
    below.ask(built, 5, "ab", first=first)
    below.flushed(built)
    below.arrived(Arrived(failed=(0,), done=(1,) if first == 0 else ()))
    assert below.of(5).given_up and below.incoming.timeouts == 0
    assert not below.advance().fetch
    below.incoming.drop(5)
    below.check_nothing_is_left(disk=first)


def test_several_failures_cut_at_the_first() -> None:
    below, built = Below(disk="a ab abc"), plan()
    below.ask(built, 5, "abc")
    below.arrived(Arrived(done=(0,), failed=(2, 1)))
    assert below.flushed(built).fetch == (Fetch(0, 0, (0,)),)


def test_a_save_that_failed_takes_nothing_from_the_host() -> None:
    below, built = Below(host="a", disk="ab"), plan()
    below.tiers.save_all([])
    below.tiers.write_through(built, lambda key: None)
    assert [save.name for save in built.save] == [0]
    below.ask(built, 5, "ab")
    below.came(0)
    below.arrived(Arrived(done=(1,), failed=(0,)))
    assert below.flushed(built).fetch == (Fetch(0, 0, (0, 1)),)


def test_a_payload_that_leaves_the_host_cuts_off_those_behind_it() -> None:
    below, built = Below(host="a ab", disk="abc"), plan()
    below.came(0, 1)
    below.ask(built, 5, "abc")
    below.flushed(built)
    # Lost with what is before it, pinned or not: here all is forgotten.
    below.tiers.clear()
    moves = below.advance()
    assert not moves.fetch and below.of(5).given_up and moves.drop == (0, 1)
    below.arrived(Arrived(done=(2,)))
    assert below.advance() == Moves(drop=(2,))
    below.incoming.drop(5)
    below.check_nothing_is_left()


def test_a_file_that_is_gone_before_its_turn_cuts_off_those_behind_it() -> None:
    below, built = Below(disk="a ab x xy"), plan()
    below.ask(built, 0, "ab")
    below.ask(built, 1, "xy", swapped=True)
    below.flushed(built)
    below.arrived(Arrived(done=(0, 1), gone=(key("xy"),)))
    assert below.advance().load == (Load(2, label("x")),)
    assert below.of(1).waits and below.of(1).end == 1


def test_a_file_that_is_gone_first_leaves_nothing_to_wait_for() -> None:
    below, built = Below(disk="a ab x xy"), plan()
    below.ask(built, 0, "ab")
    below.ask(built, 1, "xy", swapped=True)
    below.arrived(Arrived(done=(0, 1), gone=(key("x"),)))
    assert below.flushed(built).erase == erased("xy")
    assert below.of(1).given_up and len(built.load) == 2


# Not needed any more ------------------------------------------------------------------


def test_what_is_dropped_before_it_is_fetched_lets_go_of_all() -> None:
    below, built = Below(disk="a ab"), plan()
    below.ask(built, 5, "ab")
    below.flushed(built)
    below.arrived(Arrived(done=(1,)))
    below.incoming.drop(5)
    below.incoming.drop(5)  # once is enough
    assert below.incoming.holds_nothing() and below.incoming.timeouts == 0
    assert below.advance() == Moves(drop=(1,))
    below.arrived(Arrived(done=(0,)))
    assert below.advance() == Moves(drop=(0,))
    below.check_nothing_is_left(disk=2)


@pytest.mark.parametrize("has_come", [False, True])
def test_a_fetch_that_nobody_restores_is_called_off(has_come: bool) -> None:
    below, built = Below(host="a"), plan()
    below.came(0)
    below.ask(built, 5, "a")
    below.flushed(built)
    if has_come:
        below.arrived(Arrived(fetches=(0,)))
    below.incoming.drop(5)
    assert below.incoming.has_cancelled
    assert below.advance() == Moves(cancel=(0,)) and not below.incoming.has_cancelled
    below.arrived(Arrived(fetches=() if has_come else (0,)))
    below.check_nothing_is_left(host=1)


# Columns before those that came -------------------------------------------------------


def extended(host: str, disk: str, path: str, first: int) -> tuple[Below, Moves]:
    """Request 5 has fetched the columns from `first` on, as number 0, and asks at 7
    for those before."""
    below, built = Below(host, disk), plan()
    names = range(len(host.split()))
    below.came(*names)
    below.ask(built, 5, path, first, now_s=0.0)
    below.arrived(Arrived(done=tuple(load.name for load in built.load)))
    moves = below.flushed(built)
    assert [fetch.number for fetch in moves.fetch] == [0]
    below.arrived(Arrived(fetches=(0,)))
    assert below.of(5).arrived
    built = plan()
    places = below.tiers.find(keys(path)[:first])
    assert len(places) == first
    below.incoming.extend(built, 5, places, keys(path)[:first], 7.0)
    return below, below.flushed(built, 7.0)


def test_columns_before_those_that_came_are_fetched_too() -> None:
    below, moves = extended(host="ab", disk="a abc", path="abc", first=2)
    assert moves == Moves(load=(Load(2, label("a")),))
    assert below.of(5).waits and below.incoming.next_timeout_s == 17.0
    assert (below.of(5).first, below.of(5).end) == (0, 3)
    assert [below.of(5).from_disk(start) for start in range(3)] == [2, 1, 1]
    below.arrived(Arrived(done=(2,)))
    moves = below.advance(8.0)
    assert moves == Moves(fetch=(Fetch(1, 0, (2, 0)),), drop=(2,))
    assert below.of(5).waits
    below.arrived(Arrived(fetches=(1,)))
    assert below.of(5).arrived
    (early, late) = below.of(5).fetches
    assert (early.number, late.number) == (1, 0) and early.end == late.first == 2
    below.incoming.drop(5, [early, late])
    assert below.advance() == Moves()
    below.check_nothing_is_left(host=1, disk=2)


def test_a_fetch_that_is_not_restored_is_called_off_beside_one_that_is() -> None:
    below, moves = extended(host="a ab", disk="", path="ab", first=1)
    assert moves.fetch == (Fetch(1, 0, (0,)),)
    below.arrived(Arrived(fetches=(1,)))
    below.incoming.drop(5, below.of(5).fetches[1:])  # "a" was found on the device
    assert below.advance() == Moves(cancel=(1,))
    below.check_nothing_is_left(host=2)


def test_columns_behind_one_that_fails_are_called_off() -> None:
    below, moves = extended(host="abc", disk="a ab", path="abc", first=2)
    assert [load.name for load in moves.load] == [1, 2]
    below.arrived(Arrived(done=(1,), failed=(2,)))
    moves = below.advance(8.0)
    assert moves.cancel == (0,) and moves.fetch == (Fetch(1, 0, (1,)),)
    below.arrived(Arrived(fetches=(1,)))
    assert below.of(5).arrived and (below.of(5).first, below.of(5).end) == (0, 1)


@pytest.mark.parametrize("why", ["failed", "late", "dropped"])
def test_without_the_columns_before_it_what_came_is_called_off(why: str) -> None:
    below, moves = extended(host="ab", disk="a", path="ab", first=1)
    assert [load.name for load in moves.load] == [1]
    if why == "failed":
        below.arrived(Arrived(failed=(1,)))
    if why == "dropped":
        below.incoming.drop(5)
    assert below.advance(17.0).cancel == (0,)
    assert below.incoming.timeouts == (why == "late")
    if why != "dropped":
        assert below.of(5).given_up
        below.incoming.drop(5)
    if why != "failed":
        below.arrived(Arrived(done=(1,)))
    below.advance(18.0)
    gone = why == "failed"
    below.check_nothing_is_left(host=not gone, disk=not gone)
