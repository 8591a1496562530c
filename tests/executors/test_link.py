"""The simulated way to the host: queues by hand."""

from __future__ import annotations

import math

import pytest

from jaxserve.executors.link import Link, LinkCost

COST = LinkCost(block_s=0.003, fixed_s=0.001)


def test_a_transfer_takes_what_its_blocks_take() -> None:
    link = Link(COST)
    link.spill([0, 1], 1.0)
    link.fetch([0, 1], 2.0)
    assert link.next_arrival_s == pytest.approx(2.007)
    assert link.arrivals(2.006) == []
    assert link.arrivals(2.008) == [0, 1]
    assert link.arrivals(9.0) == [] and link.next_arrival_s == math.inf


def test_a_direction_carries_one_transfer_after_another() -> None:
    link = Link(COST)
    link.spill([0], 1.0)  # until 1.004
    link.spill([1, 2], 1.0)  # until 1.011
    link.fetch([0], 1.0)  # leaves when it is there: 1.004 to 1.008
    link.fetch([1], 1.0)  # 1.011 to 1.015: both ways at once
    assert link.arrivals(1.0081) == [0]
    link.fetch([2], 1.012)  # behind 1: 1.015 to 1.019
    assert link.arrivals(1.0151) == [1]
    assert link.next_arrival_s == pytest.approx(1.019)


def test_what_is_dropped_never_arrives() -> None:
    link = Link(COST)
    link.spill([0, 1], 0.0)
    link.fetch([0, 1], 0.0)
    link.drop([1])
    assert link.arrivals(9.0) == [0]


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
@pytest.mark.parametrize("field", ["block_s", "fixed_s"])
def test_times_are_numbers_of_seconds(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        LinkCost(**{field: value})
