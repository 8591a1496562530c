"""Recompute, swap, or what the cost model chooses: which way to preempt is faster?

Heavy-tailed outputs come faster than a KV cache of 20,000 tokens can take them, so that
requests lose their slots while they decode. By a published rule swapping wins where
S * kappa < B: prefill speed (tokens a second) times KV bytes of a token, against the
bandwidth of the link. It counts the way back alone; both ways take twice as long.

In simulation two models run over a sweep of bandwidths; --live serves SmolLM2 on this
machine's own link, the modes in turn, and tells how near the predictions were. Then it
simulates the same with that link, where no two runs differ.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import app, flags, logging
from tqdm import tqdm

from experiments import common, live_runs, preemption_picture
from jaxserve import EngineConfig
from jaxserve.core import Event
from jaxserve.executors.cost_model import LinearCost, get_profile
from jaxserve.executors.link import LinkCost
from jaxserve.models.base import block_bytes
from jaxserve.scheduling.policies import fcfs
from jaxserve.scheduling.preemption import break_even_tokens_s
from jaxserve.simulation import Results, simulate
from jaxserve.workloads import Workload, make_workload

_N = flags.DEFINE_integer("n", 600, "Of each run.")
_GBPS = flags.DEFINE_multi_float(
    "gbps", [2, 4, 8, 16, 32, 64], "Bandwidths of the link, GB/s each way."
)
_RATES = flags.DEFINE_multi_float("rps", [3.0, 4.0], "Requests a second.")
_LIVE = flags.DEFINE_bool("live", False, "Serve SmolLM2 on this machine instead.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Of --live, modes in turn.")
_OUT_DIR = flags.DEFINE_string(
    "out_dir", "results", "Folder for JSON lines and the picture."
)

MODES = ("recompute", "swap", "auto", "article")
BLOCK, KV_TOKENS, MODEL_LEN = 16, 20_000, 6_400


class Served(NamedTuple):
    """A model as the simulation knows it."""

    cost: LinearCost
    token_bytes: int  # of KV


# Constants of data-sheet magnitude; the smaller is `cost_model.PROFILES`' "a100-8b".
MODELS = {
    "13B, every head its own KV": Served(LinearCost(0.0, 1.6e-4, 5.1e-7, 0.02), 819200),
    "8B, KV heads shared": Served(LinearCost(0.0, 8e-5, 8.2e-8, 0.0125), 131072),
}


def config(mode: str, **changes: Any) -> EngineConfig:
    """An engine in tight memory with a host that has room."""
    options = {
        "max_model_len": MODEL_LEN,
        "block_size": BLOCK,
        "num_blocks": KV_TOKENS // BLOCK,
        "num_swap_blocks": 100_000,
        "max_num_seqs": 256,
        "enable_prefix_caching": False,
        "preemption_mode": mode,
        **changes,
    }
    return EngineConfig(**options)


def measures(results: Results) -> dict[str, float]:
    """What a run came to."""
    told = [(r.ttft_s, r.e2e_s, len(r.token_times_s)) for r in results.requests]
    e2e = [(e2e_s, tokens) for _, e2e_s, tokens in told if e2e_s is not None]
    return {
        "s_per_token": statistics.fmean(e2e_s / tokens for e2e_s, tokens in e2e),
        "ttft_s": statistics.fmean(ttft for ttft, _, _ in told if ttft is not None),
        "e2e_s": statistics.fmean(e2e_s for e2e_s, _ in e2e),
        "preemptions": results.stats["preemptions"],
        "swapped": results.stats["preemptions_by_swap"],
        "recomputed_tokens": results.stats["recomputed_tokens"],
    }


def sweep() -> list[dict[str, Any]]:
    """The simulated runs, as rows."""
    rows = []
    runs = [
        (model, rps, mode, gbps)
        for model in MODELS
        for rps in _RATES.value
        for mode in MODES
        for gbps in _GBPS.value
        if mode != "recompute" or gbps == _GBPS.value[0]  # which no link touches
    ]
    for model, rps, mode, gbps in tqdm(runs, disable=None, desc="Simulating"):
        cost, token_bytes = MODELS[model]
        n, seed = _N.value, common.seed()
        workload = make_workload("W3", n=n, seed=seed, rate=rps)
        link = LinkCost(block_s=BLOCK * token_bytes / (gbps * 1e9), fixed_s=2e-5)
        results = simulate(workload, config(mode), fcfs(), cost, link=link)
        row = {"model": model, "rps": rps, "mode": mode, "gbps": gbps}
        rows.append(row | measures(results))
    return rows


def live(path: Path) -> list[dict[str, Any]]:
    """Runs of SmolLM2 in turn, as rows, which go to a file too."""
    loaded, rows = live_runs.smollm2(), []
    workload = _short(_N.value)
    for round_ in tqdm(range(_ROUNDS.value), disable=None, desc="Rounds"):
        first = round_ % 3  # another each time: machines get slower and faster
        for mode in (MODES[:3] * 2)[first : first + 3]:
            events: list[Event] = []
            results = live_runs.serve(
                loaded, workload, _small(mode), fcfs(), on_event=events.append
            )
            row = {"clock": "wall", "round": round_, "mode": mode}
            row |= {"seconds": took_s(results), "link_gbps": _gbps(results)}
            rows.append(row | measures(results) | errors(events))
            common.write_json_lines(path, rows)  # so far: each takes minutes
    gbps = statistics.median(row["link_gbps"] for row in rows if row["link_gbps"])
    rows += on_a_clock(workload, block_bytes(loaded.model, BLOCK), gbps)
    common.write_json_lines(path, rows)
    return rows


def on_a_clock(workload: Workload, num_bytes: int, gbps: float) -> list[dict[str, Any]]:
    """The same simulated, with the costs of SmolLM2 on a CPU, as rows.

    Args:
      num_bytes: of a block. gbps: of the link, GB/s each way.
    """
    cost = get_profile("smollm2-cpu")
    link, rows = LinkCost(block_s=num_bytes / (gbps * 1e9)), []
    for mode in MODES[:3]:
        results = simulate(workload, _small(mode), fcfs(), cost, link=link)
        row = {"clock": "simulated", "round": None, "mode": mode}
        row |= {"seconds": took_s(results), "link_gbps": gbps}
        rows.append(row | measures(results) | errors(()))
    return rows


def took_s(results: Results) -> float:
    """From the first arrival to the last end."""
    starts = [r.arrival_s for r in results.requests if r.arrival_s is not None]
    ends = [r.finished_s for r in results.requests if r.finished_s is not None]
    return max(ends) - min(starts)


def _small(mode: str) -> EngineConfig:
    return config(mode, max_model_len=1024, max_num_seqs=32, num_blocks=160)


def _gbps(results: Results) -> float | None:
    """What the link carried while it was in use."""
    stats = results.stats
    seconds = stats["out_s"] + stats["in_s"]
    return (stats["out_bytes"] + stats["in_bytes"]) / seconds / 1e9 if seconds else None


def _short(n: int) -> Workload:
    """W5's lengths at the scale of a small model: an eighth, all at once."""
    jobs = make_workload("W3", n=n, seed=common.seed(), rate=1.0)
    return tuple(
        job._replace(
            arrival_s=0.0,
            prompt_tokens=max(1, job.prompt_tokens // 2),
            output_tokens=max(1, min(job.output_tokens, 512)),
        )
        for job in jobs
    )


def errors(events: Sequence[Event]) -> dict[str, float | None]:
    """How far off the predictions were after 20 decisions, in the median, by mode."""
    told = [event.data for event in events if event.kind == "resumed"][20:]
    found: dict[str, float | None] = {}
    for mode in ("recompute", "swap"):
        off = [
            abs(data["predicted_s"] - data["actual_s"]) / data["actual_s"]
            for data in told
            if data["mode"] == mode and data["actual_s"] > 0
        ]
        found[f"{mode}_error"] = statistics.median(off) if off else None
    return found


def paired(rows: Sequence[Mapping[str, Any]]) -> str:
    """Of all rounds: seconds of "auto" against the better fixed mode, and how far off
    the predictions were in the median round."""
    rows = [row for row in rows if row["clock"] == "wall"]
    took = {
        mode: [row["seconds"] for row in rows if row["mode"] == mode]
        for mode in MODES[:3]
    }
    rounds = zip(took["auto"], took["recompute"], took["swap"], strict=True)
    ratios = [auto / min(fixed) for auto, *fixed in rounds]
    total = sum(took["auto"]) / min(sum(took["recompute"]), sum(took["swap"]))
    shown = ", ".join(f"{ratio:.3f}" for ratio in ratios)
    lines = [
        f"auto against the better fixed mode: {shown}; median "
        f"{statistics.median(ratios):.3f}, all rounds together {total:.3f}"
    ]
    for mode in MODES[:3]:
        by = [row for row in rows if row["mode"] == mode]
        for way in ("recompute", "swap"):
            off = [error for row in by if (error := row[f"{way}_error"]) is not None]
            if off:
                lines.append(
                    f"{mode}: predictions of {way} off by {statistics.median(off):.3f} "
                    f"in the median round ({min(off):.3f} to {max(off):.3f})"
                )
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    logging.set_verbosity(logging.WARNING)  # JAX tells which backends it tried
    out = Path(_OUT_DIR.value)
    if _LIVE.value:
        rows = live(out / "preemption_modes_live.jsonl")
        print(common.table(rows), paired(rows), sep="\n")
        return
    rows = sweep()
    common.write_json_lines(out / "preemption_modes.jsonl", rows)
    print(common.table(rows))
    for model, (cost, token_bytes) in MODELS.items():
        crossing = token_bytes / cost.token_s / 1e9
        print(
            f"{model}: S * kappa = {crossing:.3g} GB/s; at 25 GB/s one way breaks even "
            f"at {break_even_tokens_s(25e9, token_bytes):,.0f} tokens/s"
        )
    picture = out / "preemption_modes.png"
    crossings = {m: s.token_bytes / s.cost.token_s / 1e9 for m, s in MODELS.items()}
    preemption_picture.draw(rows, crossings, picture)
    print(picture)


if __name__ == "__main__":
    app.run(main)
