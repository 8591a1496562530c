"""Compare scheduling policies over loads and seeds, simulated or on SmolLM2.

  python -m experiments.policy_sweep --workload=W3 --loads=0.75,0.95,1.15 \\
      --policies=fcfs,sjf:oracle,mlfq,my_file:my_policy --seeds=5 --out_dir=sweep

Finds the workload's saturation first; loads are relative to it. Every policy serves the
same requests at the same times. Runs above saturation have no steady state: their
latencies grow with n, so they say what a burst of n requests sees.

Writes OUT_DIR/runs.jsonl, a line a run with a hash of its configuration; runs that are
there are not run again, so a sweep that was stopped goes on where it was. The engine's
own code is not part of the hash: after changing it, take another folder. Then
OUT_DIR/tables.txt and OUT_DIR/sweep.png.
"""

from __future__ import annotations

import dataclasses

from absl import app, flags, logging

from experiments import (
    saturation,
    sweep_flags,
    sweep_picture,
    sweep_report,
    sweep_runs,
    sweep_store,
)
from experiments.sweep_runs import Run
from jaxserve.scheduling.policies import split_specs

FEW = 10
"""Requests a slot under which saturation is not a steady rate."""

flags.adopt_module_key_flags(sweep_flags)  # so that --helpshort lists them
_POLICIES = flags.DEFINE_string(
    "policies", "fcfs,sjf:oracle,mlfq", "Specs; the others are compared to the first."
)
_LOADS = flags.DEFINE_list("loads", ["0.75", "0.95", "1.15"], "Of saturation.")
_SEEDS = flags.DEFINE_integer("seeds", 5, "Paired over policies.", lower_bound=1)


def grid(base: Run, rate_rps: float, sources: dict[str, str]) -> list[Run]:
    """All runs, seed by seed within each load and policy.

    Args:
      sources: `policy_source` of each spec.
    """
    return [
        dataclasses.replace(
            base,
            policy=spec,
            policy_source=source,
            seed=seed,
            load=load,
            rate_rps=load * rate_rps,
        )
        for load in map(float, _LOADS.value)
        for spec, source in sources.items()
        for seed in range(_SEEDS.value)
    ]


def _numbers(loads: list[str]) -> bool:
    try:
        return len(loads) > 0 and all(0 < float(load) < 100 for load in loads)
    except ValueError:
        return False


flags.register_validator(
    _LOADS, _numbers, "must be numbers > 0, 1 being saturation: --loads=0.75,1.15"
)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    logging.set_verbosity(logging.WARNING)  # JAX tells which backends it tried
    try:  # before anything is run
        specs = split_specs(_POLICIES.value)
        sources = {spec: sweep_runs.policy_source(spec) for spec in specs}
        base = sweep_flags.base_run()
    except ValueError as error:
        raise app.UsageError(str(error)) from error
    path, data_dir = sweep_flags.results_path(), sweep_flags.DATA_DIR.value
    rate_rps = saturation.saturation_rps(base, path, data_dir)
    runs = grid(base, rate_rps, sources)
    done: dict[tuple[float, str], list[sweep_report.Result]] = {}
    for run, result in zip(
        runs, sweep_store.run_all(runs, path, data_dir), strict=True
    ):
        assert run.load is not None
        done.setdefault((run.load, run.policy), []).append(result)
    title = (
        f"{base.workload} ({base.trace or 'generated'}), {base.n} requests, "
        f"{_SEEDS.value} seed{'s' * (_SEEDS.value > 1)}, "
        f"saturation {rate_rps:.3g} requests/s, "
        f"{base.engine.max_num_seqs} slots, {base.executor}"
    )
    if base.n < FEW * base.engine.max_num_seqs:
        title += f"; loads are rough, for n is under {FEW} times the slots"
    tables = sweep_report.text(done, title=title)
    (path.parent / "tables.txt").write_text(tables + "\n", encoding="utf-8")
    sweep_picture.draw(done, title=title, path=path.parent / "sweep.png")
    print(f"{tables}\n\nwrote {path.parent}/tables.txt, sweep.png and runs.jsonl")


if __name__ == "__main__":
    app.run(main)
