"""Continuous against static batching on one engine: throughput, and the slots' work.

All requests of W1 (chat) are there at the start, and both modes serve the same. Prints
a table; writes a JSON line a run, and a picture of what each slot did in a small one.

  python -m experiments.static_vs_continuous --executor=jax  # SmolLM2, about a minute
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from absl import app, flags, logging
from tqdm import tqdm

from experiments import batch_panels, common, live_runs
from jaxserve import EngineConfig
from jaxserve.core import Event
from jaxserve.executors.cost_model import get_profile
from jaxserve.metrics import percentile
from jaxserve.scheduling.policies import fcfs
from jaxserve.simulation import simulate
from jaxserve.workloads import Workload, make_workload

_EXECUTOR = flags.DEFINE_enum(
    "executor", "sim", ["sim", "jax"], "Simulated time, or SmolLM2 in real time."
)
_SLOTS = flags.DEFINE_list("slots", None, "Batch sizes; default 16,32,128, 8 on jax.")
_N = flags.DEFINE_integer("n", None, "Requests; default 3000, 48 on jax.")
_SCALE = flags.DEFINE_integer("scale", None, "Divides lengths; default 1, 6 on jax.")
_SEEDS = flags.DEFINE_integer("seeds", None, "Default 5, 1 on jax.", lower_bound=1)
_DATA = flags.DEFINE_string("data_dir", None, "Folder with traces; else their twins.")
_OUT = flags.DEFINE_string("out_dir", "static_vs_continuous", "For all results.")

_DEFAULTS = {
    "sim": {"slots": ["16", "32", "128"], "n": 3000, "scale": 1, "seeds": 5},
    "jax": {"slots": ["8"], "n": 48, "scale": 6, "seeds": 1},
}
Mode = Literal["static", "continuous"]
MODES: tuple[Mode, ...] = ("static", "continuous")
Result = dict[str, Any]
Listener = Callable[[Event], None] | None


def _value(name: str) -> Any:
    given = flags.FLAGS[name].value
    return _DEFAULTS[_EXECUTOR.value][name] if given is None else given


def requests(n: int, seed: int) -> Workload:
    """The first n requests of W1, their lengths divided by the scale."""
    jobs = make_workload("W1", n=n, seed=seed, data_dir=_DATA.value)
    return tuple(
        job._replace(
            prompt_tokens=max(1, job.prompt_tokens // _value("scale")),
            output_tokens=max(1, job.output_tokens // _value("scale")),
        )
        for job in jobs
    )


def serve(mode: Mode, slots: int, jobs: Workload, on_event: Listener = None) -> Result:
    """Serve the jobs to their end, with blocks for all who can run; one result."""
    longest = max(job.prompt_tokens + job.output_tokens for job in jobs)
    config = EngineConfig(
        batching=mode,
        max_num_seqs=slots,
        max_model_len=longest,
        num_blocks=slots * -(-longest // 16),
        enable_prefix_caching=False,
    )
    if _EXECUTOR.value == "sim":
        cost = get_profile("a100-8b")
        done = simulate(jobs, config, fcfs(), cost, on_event=on_event)
    else:
        model = live_runs.smollm2()
        done = live_runs.serve(model, jobs, config, fcfs(), on_event=on_event)
    span_s = max(r.e2e_s or 0.0 for r in done.requests)  # all arrived at once
    tokens = sum(job.output_tokens for job in jobs)
    used = tokens / (slots * done.stats["steps"])
    return {"mode": mode, "slots": slots, "tok/s": tokens / span_s, "slots used": used}


def compare(slots: int, results: list[Result]) -> Result:
    """The line of one batch size: medians over seeds, and the paired ratios."""
    row: Result = {"slots": slots}
    mine = [r for r in results if r["slots"] == slots]
    by_mode = [[r for r in mine if r["mode"] == mode] for mode in MODES]
    for mode, runs in zip(MODES, by_mode, strict=True):
        for field in ("tok/s", "slots used"):
            row[f"{mode} {field}"] = percentile([r[field] for r in runs], 50)
    ratios = [b["tok/s"] / a["tok/s"] for a, b in zip(*by_mode, strict=True)]
    row |= {"ratio": percentile(ratios, 50), "low": min(ratios), "high": max(ratios)}
    return row


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    logging.set_verbosity(logging.WARNING)  # JAX tells which backends it tried
    out, n = Path(_OUT.value), _value("n")
    sizes = [int(slots) for slots in _value("slots")]
    todo = list(itertools.product(sizes, range(_value("seeds")), MODES))
    results = [
        {"n": n, "seed": seed, **serve(mode, slots, requests(n, seed))}
        for slots, seed, mode in tqdm(todo, desc="Runs", disable=None)
    ]
    common.write_json_lines(out / "runs.jsonl", [common.rounded(r) for r in results])
    print(common.table([compare(slots, results) for slots in sizes]))
    few, shown = requests(min(n, 4 * sizes[0]), 0), {}
    for mode in MODES:
        events = shown[f"{mode} batching"] = []
        serve(mode, sizes[0], few, events.append)
    batch_panels.draw(shown, sizes[0], out / "timeline.png")
    print(f"\nwrote {out / 'runs.jsonl'} and {out / 'timeline.png'}")


if __name__ == "__main__":
    app.run(main)
