"""How many requests per second FCFS just keeps up with.

All requests arrive at once, so that slots are full and a queue waits; the rate at which
they are admitted is then what the engine can take. Offered more than that, the queue
grows without end; offered less, it does not. The mean of a few seeds, since a workload
of n requests is never quite its distribution.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags, logging

from experiments import common, sweep_flags, sweep_runs, sweep_store
from experiments.sweep_runs import Run

flags.adopt_module_key_flags(sweep_flags)  # so that --helpshort lists them

SEEDS = {"sim": 5, "jax": 1}
"""Of each executor. Not those of the sweep: the rate is a property of the workload, and
stays the same when a sweep takes more seeds."""


def runs_of(run: Run) -> list[Run]:
    """What finds the saturation that `run` is loaded relative to."""
    source = sweep_runs.policy_source("fcfs")
    base = dataclasses.replace(
        run, policy="fcfs", policy_source=source, load=None, rate_rps=None
    )
    return [dataclasses.replace(base, seed=s) for s in range(SEEDS[run.executor])]


def saturation_rps(run: Run, path: Path, data_dir: str | None) -> float:
    """Requests per second; see the module. The runs are kept in the file of results.

    Args:
      run: its workload, n, engine, cost and executor are what counts.
      path, data_dir: as in `sweep_store.run_all`.
    """
    rates = rates_of(runs_of(run), path, data_dir)
    return sum(rates) / len(rates)


def rates_of(runs: Sequence[Run], path: Path, data_dir: str | None) -> list[float]:
    """Of each run of `runs_of`."""
    results = sweep_store.run_all(runs, path, data_dir)
    return [result["admissions_per_s"] for result in results]


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    logging.set_verbosity(logging.WARNING)  # JAX tells which backends it tried
    try:
        run = sweep_flags.base_run()
    except ValueError as error:
        raise app.UsageError(str(error)) from error
    path = sweep_flags.results_path()
    rates = rates_of(runs_of(run), path, sweep_flags.DATA_DIR.value)
    rows = [{"seed": seed, "requests/s": rate} for seed, rate in enumerate(rates)]
    rows.append({"seed": "mean", "requests/s": sum(rates) / len(rates)})
    print(f"saturation of {run.workload}, {run.n} requests\n{common.table(rows)}")


if __name__ == "__main__":
    app.run(main)
