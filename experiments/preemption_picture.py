"""The picture of ways to preempt: seconds a token against the link's bandwidth.

Owns colours, markers and axes. Never runs anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, NullFormatter

from experiments.pictures import COLORS, MARKERS, save


def draw(
    rows: Sequence[Mapping[str, Any]], crossings: Mapping[str, float], path: Path
) -> None:
    """A panel for each model, at the highest rate of its rows.

    Args:
      crossings: S * kappa of each model, GB/s.
    """
    rps = max(row["rps"] for row in rows)
    figure, axes = plt.subplots(
        1, len(crossings), figsize=(5.2 * len(crossings), 4.2), layout="constrained"
    )
    for axis, (model, crossing) in zip(axes, crossings.items(), strict=True):
        mine = [row for row in rows if row["model"] == model and row["rps"] == rps]
        gbps = sorted({row["gbps"] for row in mine})
        for i, mode in enumerate(dict.fromkeys(row["mode"] for row in mine)):
            by = {
                row["gbps"]: row["s_per_token"] for row in mine if row["mode"] == mode
            }
            # What no link touches was run once.
            values = [by.get(x, next(iter(by.values()))) for x in gbps]
            style = {"color": COLORS[i], "marker": MARKERS[i]}
            axis.plot(gbps, values, **style, markersize=5, label=mode, linewidth=1.5)
        for times, line in ((1, "--"), (2, ":")):
            label = f"{'' if times == 1 else '2 '}S κ = {times * crossing:.3g} GB/s"
            axis.axvline(times * crossing, color="#777777", linestyle=line, label=label)
        axis.set(
            title=f"{model}, {rps:g} requests/s",
            xlabel="link, GB/s each way",
            ylabel="mean E2E / output tokens (s)",
            xscale="log",
        )
        axis.set_xticks(gbps)
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    save(figure, path)
