"""The simulated ways between device, host and disk: queues by hand, in seconds."""

from __future__ import annotations

import math

import pytest

from jaxserve.executors.link import LinkCost, Links
from jaxserve.moves import (
    NOTHING,
    Arrived,
    Fetch,
    Label,
    Load,
    Moves,
    Save,
    Spill,
    Transferred,
)

LINK = LinkCost(block_s=2.0, fixed_s=1.0)  # 3 s a block, 5 s for two
DISK = LinkCost(block_s=10.0, fixed_s=5.0)  # 15 s a block, 25 s for two
LABEL = Label(b"key", b"parent")


def spill(*names: int) -> Moves:
    return Moves(spill=tuple(Spill(name, 0, name, 9) for name in names))


def save(*names: int) -> Moves:
    return Moves(save=tuple(Save(name, LABEL) for name in names))


def load(*names: int) -> Moves:
    return Moves(load=tuple(Load(name, LABEL) for name in names))


def fetch(number: int, *names: int) -> Moves:
    return Moves(fetch=(Fetch(number, 0, names),))


def test_a_transfer_takes_what_its_blocks_take() -> None:
    links = Links(LINK, DISK)
    links.started(spill(0, 1), 1.0)
    links.submitted(fetch(7, 0, 1), 10.0)
    assert links.next_arrival_s == 15.0
    assert links.arrived(14.9) == NOTHING and links.next_arrival_s == 15.0
    assert links.arrived(15.0) == Arrived(fetches=(7,))
    assert links.arrived(99.0) == NOTHING and links.next_arrival_s == math.inf
    assert links.timed(5.9) == []
    assert links.timed(6.0) == [Transferred("out", (0, 1), 5.0, 0.0)]
    assert links.timed(99.0) == [Transferred("in", (0, 1), 5.0, 0.0, 7)]
    assert links.timed(99.0) == []


def test_files_take_what_the_disk_takes() -> None:
    links = Links(LINK, DISK)
    links.submitted(load(3, 4), 1.0)  # until 26
    links.started(spill(0), 1.0)  # until 4
    links.started(save(0), 4.0)  # until 19
    assert links.next_arrival_s == 19.0
    assert links.arrived(19.0) == Arrived(done=(0,))
    assert links.arrived(25.9) == NOTHING
    assert links.arrived(26.0) == Arrived(done=(3, 4))
    assert links.timed(99.0) == [
        Transferred("load", (3, 4), 25.0, 0.0),
        Transferred("out", (0,), 3.0, 0.0),
        Transferred("save", (0,), 15.0, 0.0),
    ]


def test_a_way_carries_one_transfer_after_another() -> None:
    links = Links(LINK, DISK)
    links.started(spill(0), 1.0)  # 1 to 4
    links.started(spill(1, 2), 1.0)  # 4 to 9: waits 3
    links.submitted(fetch(0, 0), 1.0)  # leaves when it is there: 4 to 7
    links.submitted(fetch(1, 1), 1.0)  # 9 to 12: both ways at once
    links.submitted(fetch(2, 2), 1.0)  # behind it: 12 to 15, waits 3
    links.submitted(load(3), 2.0)  # 2 to 17
    links.submitted(load(4, 5), 2.0)  # 17 to 42: waits 15
    links.started(save(0), 2.0)  # waits for the spill alone: 4 to 19
    links.started(save(1, 2), 2.0)  # there at 9, the way is free at 19: 19 to 44
    assert set(links.timed(99.0)) == {
        Transferred("out", (0,), 3.0, 0.0),
        Transferred("out", (1, 2), 5.0, 3.0),
        Transferred("in", (0,), 3.0, 0.0, 0),
        Transferred("in", (1,), 3.0, 0.0, 1),
        Transferred("in", (2,), 3.0, 3.0, 2),
        Transferred("load", (3,), 15.0, 0.0),
        Transferred("load", (4, 5), 25.0, 15.0),
        Transferred("save", (0,), 15.0, 0.0),
        Transferred("save", (1, 2), 25.0, 10.0),
    }
    told = [
        (7.0, Arrived(fetches=(0,))),
        (12.0, Arrived(fetches=(1,))),
        (15.0, Arrived(fetches=(2,))),
        (17.0, Arrived(done=(3,))),
        (19.0, Arrived(done=(0,))),
        (42.0, Arrived(done=(4, 5))),
        (44.0, Arrived(done=(1, 2))),
    ]
    for at_s, arrived in told:
        assert links.next_arrival_s == at_s
        assert links.arrived(at_s - 0.1) == NOTHING
        assert links.arrived(at_s) == arrived
    assert links.next_arrival_s == math.inf


def test_a_way_that_was_idle_is_free_at_once() -> None:
    links = Links(LINK, DISK)
    links.submitted(load(0), 1.0)  # until 16
    links.submitted(load(1), 20.0)
    links.started(spill(2), 0.0)  # until 3
    links.started(spill(3), 5.0)
    assert links.timed(99.0) == [
        Transferred("load", (0,), 15.0, 0.0),
        Transferred("load", (1,), 15.0, 0.0),
        Transferred("out", (2,), 3.0, 0.0),
        Transferred("out", (3,), 3.0, 0.0),
    ]
    assert links.arrived(99.0) == Arrived(done=(0, 1))


@pytest.mark.parametrize("together", [False, True])
def test_a_fetch_leaves_once_all_its_payloads_are_on_the_host(together: bool) -> None:
    links = Links(LINK, DISK)
    links.started(spill(0), 0.0)  # there at 3
    first = load(1, 2)  # there at 25
    if together:
        links.submitted(first._replace(fetch=(Fetch(4, 0, (0, 1, 2)),)), 0.0)
    else:
        links.submitted(first, 0.0)
        links.submitted(fetch(4, 0, 1, 2), 1.0)
    links.submitted(fetch(5, 0), 30.0)  # behind it, until 32
    assert links.arrived(31.9) == Arrived(done=(1, 2))
    assert links.arrived(32.0) == Arrived(fetches=(4,))
    assert links.arrived(35.0) == Arrived(fetches=(5,))
    assert [sent for sent in links.timed(99.0) if sent.way == "in"] == [
        Transferred("in", (0, 1, 2), 7.0, 0.0, 4),
        Transferred("in", (0,), 3.0, 2.0, 5),
    ]


def test_a_launch_saves_what_it_spills() -> None:
    links = Links(LINK, DISK)
    links.started(spill(0, 1)._replace(save=save(1).save), 2.0)  # spilled at 7
    assert links.next_arrival_s == 22.0
    assert links.timed(99.0) == [
        Transferred("out", (0, 1), 5.0, 0.0),
        Transferred("save", (1,), 15.0, 0.0),
    ]


def test_a_payload_that_was_loaded_can_be_saved() -> None:
    links = Links(LINK, DISK)
    links.submitted(load(0), 0.0)  # there at 15
    links.started(save(0), 1.0)  # another way: 15 to 30
    assert links.arrived(29.9) == Arrived(done=(0,))
    assert links.arrived(30.0) == Arrived(done=(0,))


def test_orders_are_told_as_they_end_and_equals_as_they_were_asked_for() -> None:
    links = Links(LinkCost(fixed_s=1.0), LinkCost(fixed_s=2.0))
    links.submitted(load(8, 2, 5), 0.0)  # until 2
    links.started(spill(7), 0.0)  # until 1
    links.submitted(fetch(6, 7), 1.0)  # until 2
    links.submitted(fetch(3, 7), 0.0)  # until 3
    links.started(save(7), 0.0)  # until 3
    links.submitted(load(1), 0.0)  # until 4
    assert links.arrived(3.0) == Arrived(fetches=(6, 3), done=(8, 2, 5, 7))
    assert links.arrived(4.0) == Arrived(done=(1,))


def test_a_fetch_goes_on_when_its_payloads_are_dropped_or_nobody_wants_it() -> None:
    links = Links(LINK, DISK)
    links.started(spill(0, 1), 0.0)  # until 5
    links.submitted(fetch(0, 0), 0.0)  # 5 to 8
    links.submitted(fetch(1, 1), 0.0)  # 8 to 11
    links.started(Moves(drop=(0,), cancel=(0,)), 1.0)
    assert links.arrived(99.0) == Arrived(fetches=(0, 1))
    assert links.timed(99.0)[-1] == Transferred("in", (1,), 3.0, 3.0, 1)
    # Of what was dropped nothing is remembered, or memory would grow for ever.
    with pytest.raises(KeyError):
        links.submitted(fetch(2, 0), 99.0)


def test_a_disk_costs_nothing_unless_it_is_said_to() -> None:
    links = Links(LINK)
    links.submitted(load(0), 4.0)
    assert links.next_arrival_s == 4.0 and links.arrived(4.0) == Arrived(done=(0,))


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
@pytest.mark.parametrize("field", ["block_s", "fixed_s"])
def test_times_are_numbers_of_seconds(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        LinkCost(**{field: value})
