"""What is known of the ways when a victim is preempted, by hand."""

from __future__ import annotations

import pytest

from jaxserve.moves import Transferred
from jaxserve.scheduling.decisions import Decisions, Loss
from jaxserve.scheduling.preemption import Way

VICTIM = Loss(input_tokens=100, rows=160, blocks=10, named=0, shared=0)
"""Computed again in 33 ms by the rates that are taken at first: 160 tokens of 0.2 ms,
and 12,880 pairs of 0.1 us."""


def with_a_queue(way: str) -> Decisions:
    """A block takes 1 ms on every way, so that the victim's take 20 ms to the host and
    back, and 40 to disk. One copy of this way once waited 10 s; an eighth of that is
    expected."""
    decisions = Decisions("auto", 16)
    for each in ("out", "in", "save", "load"):
        waited_s = 10.0 if each == way else 0.0
        for blocks, waits_s in ((1, 0.0), (100, waited_s)):
            names = tuple(range(blocks))
            decisions.transferred([Transferred(each, names, blocks * 1e-3, waits_s)])
    return decisions


@pytest.mark.parametrize(
    ("queue", "way", "others", "after"),
    [
        ("in", "swap", 0, 35),  # 1.25 s * (7/8) ** 35 < 33 - 20 ms
        ("load", "disk", 1, 29),  # 1.25 s * (7/8) ** 29 < 2 * 33 - 40 ms
    ],
)
def test_a_way_that_was_crowded_is_tried_again(
    queue: str, way: Way, others: int, after: int
) -> None:
    """Each time that nobody goes that way an eighth less is expected."""
    decisions, room = with_a_queue(queue), ("recompute", way)
    chosen = [decisions.choose(i, VICTIM, room, others) for i in range(after + 1)]
    assert chosen == ["recompute"] * after + [way]


@pytest.mark.parametrize(
    ("queue", "way", "others"),
    [("in", "swap", 0), ("in", "disk", 1), ("load", "disk", 1)],
)
def test_who_goes_that_way_finds_it_as_crowded_as_before(
    queue: str, way: Way, others: int
) -> None:
    decisions = with_a_queue(queue)
    for i in range(60):
        assert decisions.choose(i, VICTIM, (way,), others) == way
    assert decisions.choose(60, VICTIM, ("recompute", way), others) == "recompute"
