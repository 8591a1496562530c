"""What is told of launches that a simulation ran without planning them one by one.

Owns that their events are those which planning each would have told. Never decides how
many there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from jaxserve.accounts import decode_work
from jaxserve.config import EngineShape
from jaxserve.live import Live
from jaxserve.reports import Reports
from jaxserve.scheduling.running import Row, progressed
from jaxserve.scheduling.scheduler import Scheduler


def tell_leap(
    scheduler: Scheduler,
    reports: Reports,
    shape: EngineShape,
    rows: Sequence[Row],
    lives: Mapping[int, Live],
    times_s: Sequence[float],
    host_s: float,
    conclude: Callable[[], None],
) -> None:
    """Tell of decodes that ran alike.

    Args:
      rows: of each launch.
      lives: by submission index.
      times_s: when the first began, and when each ended.
      host_s: scheduling time of each.
      conclude: ends requests; called once all their progress is told.
    """
    active = [row.running for row in rows if row.steps]
    launches, steps = len(times_s) - 1, shape.decode_steps
    new = launches * steps
    told = 0 if scheduler.holds_answers else steps  # output tokens a launch
    for running in active:
        if scheduler.listens:
            scheduler.note(progressed(running, times_s[-1], 0, told * launches))
        if told:
            times = [t for t in times_s[1:] for _ in range(steps)]
            lives[running.request.index].took(times)
    work, first = decode_work(shape, rows), reports.accounts.launches
    for i, (began_s, end_s) in enumerate(itertools.pairwise(times_s), start=1):
        if reports.wanted:
            for running in active:
                reports.add(progressed(running, end_s, 0, told))
        if i == launches:
            conclude()
        if reports.wanted:
            left = new - i * steps  # tokens of each still to come
            later = sum(
                shape.blocks(r.planned) - shape.blocks(r.planned - left) for r in active
            )
            reports.add_launch(
                end_s,
                work,
                launch=first + i - 1,
                num_free=scheduler.free_blocks + later,
                live_handles=0,
                idle_handles=0,
                waiting=scheduler.num_waiting,
                running=scheduler.num_running,
                host_s=host_s,
                submitted_s=began_s,
            )
    reports.accounts.repeat(work, launches, host_s)
    reports.accounts.output_tokens += new * len(active)
