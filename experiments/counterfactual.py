"""What if another policy had taken over? One engine state, two policies from there on.

  python -m experiments.counterfactual --first=fcfs --then=mlfq --at_s=60

Serves a workload under one policy until a moment, takes a snapshot of the engine, and
goes on from it twice: under the same policy, and under another. Nothing else differs,
so the difference of a request is the other policy's doing. Requests that ended before
are left out; those that arrive later are in it.

Simulated (an 8B model on one GPU), or with --live on SmolLM2 itself.

Writes OUT_DIR/counterfactual.jsonl, a line a request, and OUT_DIR/counterfactual.png.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from absl import app, flags, logging
from tqdm import tqdm

from experiments import common, live_runs
from experiments.pictures import COLORS, save
from jaxserve import Engine, EngineConfig
from jaxserve.executors.cost_model import get_profile
from jaxserve.metrics import RequestMetrics
from jaxserve.scheduling.policies import Policy, get_policy
from jaxserve.simulation import ended, simulated_engine
from jaxserve.workloads import Workload, make_workload

_WORKLOAD = flags.DEFINE_string("workload", "W3", "Of jaxserve.workloads.")
_N = flags.DEFINE_integer("n", 400, "Requests.", lower_bound=2)
_RPS = flags.DEFINE_float("rps", 8.0, "Requests a second.")
_FIRST = flags.DEFINE_string("first", "fcfs", "Policy until the snapshot.")
_THEN = flags.DEFINE_string("then", "mlfq", "The other policy after it.")
_AT_S = flags.DEFINE_float("at_s", 30.0, "When the snapshot is taken.", lower_bound=0)
_LIVE = flags.DEFINE_bool("live", False, "On SmolLM2 instead, in real time.")
_OUT_DIR = flags.DEFINE_string("out_dir", "results", "Folder for lines and picture.")

Begin = Callable[[Policy], Engine]

STATES = BEGUN, WAITING, TO_COME = "begun", "waiting", "still to come"
"""What a request can be at the snapshot; those that were preempted had begun."""


def simulated(workload: Workload) -> Begin:
    """Makes simulated engines of tight memory."""
    config = EngineConfig(
        max_model_len=6400,
        num_blocks=1250,
        max_num_seqs=64,
        enable_prefix_caching=False,
    )
    cost = get_profile("a100-8b")
    return lambda policy: simulated_engine(workload, config, policy, cost, jump=False)


def live(workload: Workload) -> Begin:
    """Makes engines of SmolLM2."""
    config = EngineConfig(max_model_len=1024, num_blocks=192, max_num_seqs=16)
    loaded = live_runs.smollm2()
    return lambda policy: live_runs.begin(loaded, workload, config, policy)


def short(workload: Workload) -> Workload:
    """The lengths at the scale of a small model on a CPU."""
    return tuple(
        job._replace(
            prompt_tokens=max(1, job.prompt_tokens // 4),
            output_tokens=max(1, min(job.output_tokens // 4, 256)),
        )
        for job in workload
    )


def run(begin: Begin, first: str, then: str, at_s: float) -> list[dict[str, Any]]:
    """A row for each request that had not ended at the snapshot."""
    engine = begin(get_policy(first))
    with tqdm(total=round(at_s), disable=None, desc=f"Until {at_s:g} s") as bar:
        while engine.has_unfinished_requests() and engine.now() < at_s:
            engine.step()
            bar.update(min(round(engine.now()), bar.total) - bar.n)
    snapshot = engine.snapshot()
    left = engine.get_num_unfinished_requests()
    if not left:
        raise app.UsageError(f"--at_s={at_s:g}: every request has ended by then")
    runs = []
    for name, policy in ((first, None), (then, get_policy(then))):
        engine.restore(snapshot, policy)
        with tqdm(total=left, disable=None, desc=name) as bar:
            runs.append(ended(engine, bar.update))
    return [
        {
            "request": index,
            "prompt_tokens": one.prompt_tokens,
            "output_tokens": one.output_tokens,
            "state": _state(one, snapshot.time_s),
            "first_e2e_s": one.e2e_s,
            "then_e2e_s": runs[1][index].e2e_s,
            "first_ttft_s": one.ttft_s,
            "then_ttft_s": runs[1][index].ttft_s,
            "difference_s": (runs[1][index].e2e_s or 0.0) - (one.e2e_s or 0.0),
        }
        for index, one in sorted(runs[0].items())
    ]


def _state(request: RequestMetrics, time_s: float) -> str:
    """What a request that had not ended was then."""
    assert request.arrival_s is not None
    if request.arrival_s > time_s:
        return TO_COME
    admitted_s = request.admitted_s
    return BEGUN if admitted_s is not None and admitted_s <= time_s else WAITING


def summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Differences over all requests, over the shorter and the longer half, and by what
    they were at the snapshot."""
    median = statistics.median(row["output_tokens"] for row in rows)
    groups = {
        "all": list(rows),
        f"up to {median:g} output tokens": [
            row for row in rows if row["output_tokens"] <= median
        ],
        "longer": [row for row in rows if row["output_tokens"] > median],
        **{state: [row for row in rows if row["state"] == state] for state in STATES},
    }
    return [
        {
            "requests": name,
            "n": len(group),
            "sooner": sum(row["difference_s"] < 0 for row in group),
            "later": sum(row["difference_s"] > 0 for row in group),
            "mean_s": statistics.fmean(row["difference_s"] for row in group),
            "median_s": statistics.median(row["difference_s"] for row in group),
            "best_s": min(row["difference_s"] for row in group),
            "worst_s": max(row["difference_s"] for row in group),
        }
        for name, group in groups.items()
        if group
    ]


def draw(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Each request's difference, by its output length and in order."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 4.4), layout="constrained", sharey=True
    )
    for label, color in zip(STATES, COLORS[1:], strict=False):
        mine = [row for row in rows if row["state"] == label]
        x, y = ([row[f] for row in mine] for f in ("output_tokens", "difference_s"))
        left.scatter(x, y, s=14, color=color, alpha=0.7, label=label)
    left.set(xlabel="output tokens", xscale="log", ylabel="E2E, difference (s)")
    left.legend(title="at the snapshot")
    ordered = sorted(row["difference_s"] for row in rows)
    colors = [COLORS[6] if value < 0 else COLORS[4] for value in ordered]
    right.bar(range(len(ordered)), ordered, width=1.0, color=colors)
    right.set(xlabel="requests, in order of their difference")
    for axis in (left, right):
        axis.axhline(0, color="#777777", linewidth=1)
        axis.grid(alpha=0.3)
    figure.suptitle(title)
    save(figure, path)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    logging.set_verbosity(logging.WARNING)  # JAX tells which backends it tried
    first, then, at_s = _FIRST.value, _THEN.value, _AT_S.value
    n, seed = _N.value, common.seed()
    workload = make_workload(_WORKLOAD.value, n=n, seed=seed, rate=_RPS.value)
    try:  # before anything is run
        for spec in (first, then):
            get_policy(spec)
    except ValueError as error:
        raise app.UsageError(str(error)) from error
    begin = live(short(workload)) if _LIVE.value else simulated(workload)
    rows = run(begin, first, then, at_s)
    out = Path(_OUT_DIR.value)
    common.write_json_lines(out / "counterfactual.jsonl", rows)
    title = f"{then} instead of {first} from {at_s:g} s on: seconds, negative is sooner"
    print(title, common.table(summary(rows)), sep="\n")
    picture = out / "counterfactual.png"
    draw(rows, title, picture)
    print(picture)


if __name__ == "__main__":
    app.run(main)
