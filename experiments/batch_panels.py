"""A picture of several runs of one workload: what each slot did, on one axis of time.

Owns the drawing, in which a slot that is computed for nobody can be told from one that
works. Never sees an engine, only its events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from experiments import timeline
from experiments.pictures import save
from jaxserve.core import Event

PADDING = "#8c8c8c"
LABELS = {
    "prefill": timeline.PREFILL,
    "decode": timeline.DECODE,
    "ended, computed as padding": PADDING,
    "idle": timeline.IDLE,
}


def _rows(launch: Event, *, padding: bool) -> Event:
    """The launch with its rows of no tokens alone, or without them."""
    rows = launch.data["slots"]
    kept = [row for row in rows if (row[1:] == [0, 0]) == padding]
    return launch._replace(data={**launch.data, "slots": kept})


def _panel(axis: Axes, events: Sequence[Event], slots: int, title: str) -> float:
    """Draw a run from its first launch on; return how long it took in seconds."""
    launches = [e for e in events if e.kind == "launch" and e.data["token_bucket"]]
    begin, end = launches[0].data["submitted_s"], launches[-1].time_s
    axis.barh(range(slots), end - begin, 0.8, color=timeline.IDLE)
    for padding in (False, True):
        kept = [_rows(launch, padding=padding) for launch in launches]
        for bar in timeline.bars(kept, least_gap_s=(end - begin) / timeline.PIXELS):
            axis.barh(
                bar.slot,
                bar.end_s - bar.start_s,
                0.8,
                left=bar.start_s - begin,
                color=PADDING if padding else bar.color,
            )
    axis.set(ylabel="slot", ylim=(-0.6, slots - 0.4), title=title)
    return end - begin


def draw(runs: Mapping[str, Sequence[Event]], slots: int, path: Path) -> None:
    """Draw the runs, one below the other, to a PNG.

    Args:
      runs: title to events. slots: of each engine.
    """
    figure, axes = plt.subplots(
        len(runs), 1, figsize=(11, 6.5), sharex=True, layout="constrained"
    )
    ends_s = [
        _panel(axis, events, slots, title)
        for axis, (title, events) in zip(axes, runs.items(), strict=True)
    ]
    axes[-1].set(xlabel="seconds", xlim=(0, max(ends_s)))
    handles = [Patch(color=color, label=name) for name, color in LABELS.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    save(figure, path)
