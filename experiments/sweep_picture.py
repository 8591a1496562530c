"""The picture of a sweep: latencies against load.

Owns colours, markers and axes. Never runs anything.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from experiments.pictures import COLORS, MARKERS, save
from experiments.sweep_report import Results, over_seeds
from experiments.sweep_stats import bootstrap

PANELS = {
    "ttft_s_mean": "mean TTFT (s)",
    "s_per_token_mean": "mean E2E / output tokens (s)",
    "e2e_s_p99": "P99 E2E (s)",
}


def draw(results: Results, *, title: str, path: Path) -> None:
    """The picture: a panel a measure, a line a policy, against load.

    Bands are 95 % intervals of the mean over seeds.
    """
    policies = list(dict.fromkeys(policy for _, policy in results))
    loads = list(dict.fromkeys(load for load, _ in results))
    figure, axes = plt.subplots(1, len(PANELS), figsize=(12, 4.6), layout="constrained")
    for axis, (field, label) in zip(axes, PANELS.items(), strict=True):
        for i, policy in enumerate(policies):
            color = COLORS[i % len(COLORS)]
            runs = [results[load, policy] for load in loads]
            means = [over_seeds(r, field) for r in runs]
            style = {"color": color, "marker": MARKERS[i % len(MARKERS)]}
            axis.plot(loads, means, **style, markersize=5, label=policy, linewidth=1.5)
            bands = [bootstrap([r[field] or 0.0 for r in run]) for run in runs]
            if all(bands):
                low, high = zip(*bands, strict=True)
                axis.fill_between(loads, low, high, color=color, alpha=0.15, lw=0)
        axis.set(title=label, xlabel="load, 1 = saturation", yscale="log")
        axis.set_xticks(loads)
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.grid(alpha=0.3)
    figure.suptitle(title)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(len(labels), 3)
    )
    save(figure, path)
