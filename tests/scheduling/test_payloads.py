"""Blocks of host memory, counted by hand."""

from __future__ import annotations

import pytest

from jaxserve.scheduling.payloads import Payloads
from tests.scheduling.labels import plan


def dropped(payloads: Payloads) -> list[int]:
    """What the next plan drops."""
    built = plan()
    payloads.flush(built)
    return built.drop


def test_each_part_has_its_own_room() -> None:
    payloads = Payloads(3, window=2)
    payloads.promised = 2
    assert (payloads.size("pool"), payloads.size("window")) == (3, 2)
    assert (payloads.free("pool"), payloads.free("window")) == (1, 2)
    payloads.new("pool")
    payloads.new("window")
    assert (payloads.used("pool"), payloads.used("window")) == (1, 1)
    assert (payloads.free("pool"), payloads.free("window")) == (0, 1)
    assert Payloads(3).size("window") == 0


def test_a_payload_is_here_once_it_has_come() -> None:
    payloads = Payloads(2, window=2)
    names = [payloads.new("pool"), payloads.new("window")]
    assert names == [0, 1] and not any(map(payloads.is_here, names))
    assert all(map(payloads.holds, names))
    payloads.came([1])
    assert not payloads.is_here(0) and payloads.is_here(1)


def test_a_payload_is_dropped_once_no_part_keeps_it() -> None:
    payloads = Payloads(1, window=1)
    name = payloads.new("pool")
    payloads.hold(name, "window")
    payloads.let_go(name, "pool")
    payloads.let_go(name, "pool")  # once is enough
    assert payloads.holds(name) and not payloads.has_dropped
    assert (payloads.free("pool"), payloads.free("window")) == (1, 0)
    payloads.let_go(name, "window")
    assert not payloads.holds(name) and payloads.has_dropped
    assert payloads.free("window") == 1
    assert dropped(payloads) == [name]
    assert not payloads.has_dropped and dropped(payloads) == []


@pytest.mark.parametrize("both", [False, True])
def test_a_payload_that_never_came_is_not_dropped(both: bool) -> None:
    payloads = Payloads(1, window=1)
    name = payloads.new("window")
    if both:
        payloads.hold(name, "pool")
    payloads.vanish(name)
    payloads.let_go(name, "window")
    assert not payloads.holds(name) and dropped(payloads) == []
    assert payloads.free("pool") == payloads.free("window") == 1


def test_no_name_is_used_again_and_each_copy_is_told_once() -> None:
    payloads = Payloads(1, window=1)
    first = payloads.new("pool", request=7)
    payloads.let_go(first, "pool")
    assert dropped(payloads) == [first]
    second = payloads.new("window", request=7)
    payloads.vanish(second)
    assert [payloads.new("pool"), payloads.new("window", request=3)] == [2, 3]
    assert payloads.take_copied() == [(7, 0), (7, 1), (3, 3)]
    assert payloads.take_copied() == []
