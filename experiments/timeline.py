"""A picture of a run: what each slot did over time, and the KV blocks in use below.

Owns the drawing. Never sees an engine, only its events.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
from matplotlib.artist import Artist
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from experiments.pictures import save
from jaxserve.core import Event

PREFILL, DECODE, IDLE, PREEMPTED = "#d95f02", "#1b6ca8", "#eeeeee", "#c2185b"
CACHED = "#9fc5e0"
PIXELS = 1400  # about the width of the picture


class Bar(NamedTuple):
    """What one slot did without a pause."""

    slot: int
    color: str
    start_s: float
    end_s: float


def bars(launches: Sequence[Event], least_gap_s: float) -> list[Bar]:
    """The slots' work as bars; what goes on after less than least_gap_s is one bar.

    Bars of single launches would leave a stripe of background between any two.
    """
    done: list[Bar] = []
    last: dict[int, Bar] = {}  # by slot
    for event in launches:
        start_s, end_s = event.data["submitted_s"], event.time_s
        for slot, prompt_tokens, _ in event.data["slots"]:
            color = PREFILL if prompt_tokens else DECODE
            bar = last.get(slot)
            if bar and bar.color == color and start_s - bar.end_s < least_gap_s:
                last[slot] = bar._replace(end_s=end_s)
            else:
                if bar:
                    done.append(bar)
                last[slot] = Bar(slot, color, start_s, end_s)
    return done + list(last.values())


def draw(events: Sequence[Event], num_blocks: int, slots: int, path: Path) -> None:
    """Draw the run to a PNG.

    Args:
      events: of the run, in order. num_blocks, slots: of the engine.
    """
    launches = [e for e in events if e.kind == "launch" and e.data["token_bucket"]]
    begin = launches[0].data["submitted_s"]
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(11, 5.5), sharex=True, height_ratios=[2, 1], layout="constrained"
    )
    end = launches[-1].time_s
    top.barh(range(slots), end - begin, 0.8, color=IDLE)
    for bar in bars(launches, least_gap_s=(end - begin) / PIXELS):
        top.barh(
            bar.slot,
            bar.end_s - bar.start_s,
            0.8,
            left=bar.start_s - begin,
            color=bar.color,
        )
    lost = [e for e in events if e.kind == "preempted"]
    top.scatter(
        [e.time_s - begin for e in lost],
        [e.data["slot"] for e in lost],
        marker="x",
        color=PREEMPTED,
        zorder=3,
    )
    labels = {PREFILL: "prefill", DECODE: "decode", IDLE: "idle"}
    handles: list[Artist] = [Patch(color=c, label=name) for c, name in labels.items()]
    label = f"preempted ({len(lost)})"
    handles.append(Line2D([], [], color=PREEMPTED, marker="x", ls="", label=label))
    top.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4)
    top.set(ylabel="slot", yticks=range(slots), ylim=(-0.6, slots - 0.4))
    times = [e.time_s - begin for e in launches]
    idle = [e.data["idle_handles"] for e in launches]
    used = [num_blocks - e.data["num_free"] - e.data["idle_handles"] for e in launches]
    bottom.stackplot(
        times,
        used,
        idle,
        step="post",
        colors=[DECODE, CACHED],
        labels=["of running requests", "cached, evictable"],
    )
    bottom.axhline(num_blocks, color="black", linewidth=0.8, linestyle=":")
    bottom.set(xlabel="seconds", ylabel="KV blocks", xlim=(0, end - begin))
    bottom.set_ylim(0, num_blocks * 1.08)
    bottom.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    save(figure, path)
