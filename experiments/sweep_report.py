"""The tables of a sweep: measures, and ratios over paired seeds.

Owns how results read. Never runs anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments import common
from experiments.sweep_stats import Ratio, paired

Result = Mapping[str, float | None]
Results = Mapping[tuple[float, str], Sequence[Result]]
"""By (load, policy): the results of the seeds, in the order of the seeds."""

LATENCIES = {
    "ttft_s": "TTFT s",
    "tpot_s": "TPOT s",
    "max_itl_s": "max ITL s",
    "e2e_s": "E2E s",
    "s_per_token": "E2E s/token",
    "slowdown": "slowdown",
}

TOTALS = {
    "output_tokens_per_s": "tokens/s",
    "requests_per_s": "req/s",
    "jain": "Jain",
    "preemptions": "preempted",
    "recomputed_tokens": "recomputed",
    "starvation_s": "longest wait s",
}

COMPARED = {
    "ttft_s_mean": "TTFT mean",
    "ttft_s_p99": "TTFT P99",
    "s_per_token_mean": "s/token mean",
    "e2e_s_mean": "E2E mean",
    "e2e_s_p99": "E2E P99",
}


def over_seeds(results: Sequence[Result], field: str) -> float | None:
    """The mean of a measure; None unless every seed has it."""
    values = [r[field] for r in results]
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if len(known) == len(values) and known else None


def latencies(results: Results) -> str:
    """The table of latencies: mean / P50 / P99 of the requests, mean of the seeds."""

    def cell(runs: Sequence[Result], name: str) -> str:
        fields = [over_seeds(runs, f"{name}_{x}") for x in ("mean", "p50", "p99")]
        return " / ".join("-" if v is None else f"{v:.3g}" for v in fields)

    return common.table(
        [
            {"load": load, "policy": policy}
            | {head: cell(runs, name) for name, head in LATENCIES.items()}
            for (load, policy), runs in results.items()
        ]
    )


def totals(results: Results) -> str:
    """The table of what a run has one number of, mean of the seeds."""

    def show(value: float | None) -> str:
        if value is None:
            return "-"
        if value == int(value):
            return f"{value:,.0f}"
        return f"{value:.4f}" if value < 1 else f"{value:,.{2 if value < 100 else 0}f}"

    return common.table(
        [
            {"load": load, "policy": policy}
            | {head: show(over_seeds(runs, name)) for name, head in TOTALS.items()}
            for (load, policy), runs in results.items()
        ]
    )


def ratios(results: Results) -> str:
    """How many times shorter than under the first policy, over paired seeds."""
    first = next(iter(results))[1]

    def cell(load: float, runs: Sequence[Result], field: str) -> str:
        base = [r[field] for r in results[load, first]]
        return _ratio(paired(base, [r[field] for r in runs]))

    rows: list[dict[str, Any]] = [
        {"load": load, f"{first} over": policy}
        | {head: cell(load, runs, field) for field, head in COMPARED.items()}
        for (load, policy), runs in results.items()
        if policy != first
    ]
    return common.table(rows)


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return "-"
    if ratio.interval is None:
        return f"{ratio.mean:.2f}"
    low, high = ratio.interval
    spread = f"{ratio.low:.2f}..{ratio.high:.2f}"
    return f"{ratio.mean:.2f} [{low:.2f}, {high:.2f}] {spread}"


def text(results: Results, *, title: str) -> str:
    """All tables, with what their cells mean."""
    seeds = len(next(iter(results.values())))
    parts = [title, "Latencies: mean / P50 / P99 of a run's requests"]
    parts += [latencies(results), "Totals", totals(results)]
    if len({policy for _, policy in results}) > 1:
        how = "" if seeds < 2 else " [95 % bootstrap over seeds] lowest..highest seed"
        parts += [f"Times shorter, paired seeds: mean{how}", ratios(results)]
    return "\n\n".join(parts)
