"""How long nothing can change: the launches that a simulation need not plan one by one.

Owns the one rule for jumping. Never sees an output that is not known yet: whoever jumps
also stops with the launch in which a request ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.config import EngineShape
from jaxserve.scheduling.budget import Budget
from jaxserve.scheduling.ranking import Ranking
from jaxserve.scheduling.running import Row


class Horizon(NamedTuple):
    """Launches that are sure to be alike.

    Attributes:
      rows: of each of them: all running requests, N steps each; none for those that
        pad a static batch.
      launches: how many, at most.
      until_s: none of them may be planned at this time or later.
    """

    rows: Sequence[Row]
    launches: int
    until_s: float


NOTHING = Horizon((), 0, -math.inf)


def horizon(
    rows: Sequence[Row],
    budget: Budget,
    ranking: Ranking,
    shape: EngineShape,
    *,
    may_join: bool,
    slot_free: bool,
) -> Horizon:
    """How often the next plan would be these rows, if nobody arrives, ends or aborts.

    Args:
      rows: decodes, as in `Horizon`. No block has a name, and `ranking` is fresh.
      may_join: waiting requests are admitted when there is room.
    """
    n = shape.decode_steps
    active = [row.running for row in rows if row.steps]
    launches = min((r.tokens_left // n for r in active), default=0)
    for running in active:
        allowed = ranking.allow(running.request)
        if allowed is not None:
            launches = min(launches, (allowed - 1) // n)
    launches = _within(budget.count.free, [r.planned for r in active], launches, shape)
    if launches < 1:
        return NOTHING
    if may_join and ranking.num_waiting:
        # They wait on: no slot is free, and none can be taken from a larger class.
        stuck = not slot_free and ranking.first_waiting_class >= ranking.last_class
        if not stuck or ranking.reacts_to_progress(active, launches * n):
            return NOTHING
    return Horizon(rows, launches, ranking.next_due_s)


def _within(
    free: int, lengths: Sequence[int], launches: int, shape: EngineShape
) -> int:
    """The most launches whose new rows fit in `free` blocks, by bisection."""

    def fits(count: int) -> bool:
        rows = count * shape.decode_steps
        new = sum(shape.blocks(n + rows) - shape.blocks(n) for n in lengths)
        return new <= free

    if launches < 1 or fits(launches):
        return launches
    low, high = 0, launches - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
