"""Many runs on all cores, with their results in a file.

Owns the file of results: a JSON line a run, which no later sweep runs again.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from experiments import sweep_runs
from experiments.sweep_runs import Run


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """The lines of a file of results, by key; what was cut off is taken out of it."""
    if not path.exists():
        return {}
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]  # a sweep that was killed may leave a half
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    lines = [json.loads(line) for line in whole.splitlines()]
    return {line["key"]: line for line in lines}


def run_all(
    runs: Sequence[Run], path: Path, data_dir: str | None, processes: int | None = None
) -> list[dict[str, Any]]:
    """The results of the runs, in their order; those in the file are not run again.

    Args:
      path: the file of results, JSON lines; each run is added as it ends.
      processes: how many simulations at once; None is one a core. Real runs go one at a
        time.
    """
    done = read_results(path)
    keys = [run.key for run in runs]
    pending = [r for r, key in zip(runs, keys, strict=True) if key not in done]
    path.parent.mkdir(parents=True, exist_ok=True)
    bar = tqdm(total=len(pending), desc="Runs", disable=None)
    with path.open("a", encoding="utf-8") as file, bar:
        for line in _execute_all(pending, data_dir, processes):
            file.write(json.dumps(line) + "\n")
            file.flush()
            done[line["key"]] = line
            bar.update()
    return [done[key]["result"] for key in keys]


def _execute_all(
    runs: Sequence[Run], data_dir: str | None, processes: int | None
) -> Iterator[dict[str, Any]]:
    task = functools.partial(sweep_runs.execute, data_dir=data_dir)
    workers = min(processes or os.cpu_count() or 1, len(runs))
    if workers < 2 or any(run.executor == "jax" for run in runs):
        yield from map(task, runs)
        return
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield from pool.imap_unordered(task, runs)
