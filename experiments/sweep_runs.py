"""One run of the sweep: what it is, its key, and its result.

Owns what identifies a run. Never compares runs.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
import time
from pathlib import Path
from typing import Any

from experiments import live_runs, sweep_stats
from jaxserve import EngineConfig
from jaxserve.executors.cost_model import LinearCost
from jaxserve.scheduling.policies import get_policy
from jaxserve.simulation import simulate
from jaxserve.workloads import Workload, make_workload, trace_path, with_arrivals


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that a result depends on but the engine's own code.

    Attributes:
      executor: "sim" keeps the time of `cost`; "jax" serves SmolLM2 in real time.
      policy: its spec. policy_source: digest of the file that ranks.
      trace: file name of the trace that the lengths are from; None: generated.
      scale: all lengths are divided by it.
      load: of saturation, which is where rate_rps comes from. rate_rps: requests per
        second; None: all at time 0.
      cost: of the simulated clock; also what slowdowns are relative to.
    """

    executor: str
    policy: str
    policy_source: str
    workload: str
    trace: str | None
    n: int
    seed: int
    scale: int
    load: float | None
    rate_rps: float | None
    engine: EngineConfig
    cost: LinearCost

    @property
    def key(self) -> str:
        """A hash of all fields."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def policy_source(spec: str) -> str:
    """A digest of the file in which the policy's `rank` is, which a user may edit."""
    rank: Any = get_policy(spec, truth={}).rank
    while isinstance(rank, functools.partial):
        rank = rank.func
    file = inspect.getsourcefile(rank if inspect.isroutine(rank) else type(rank))
    assert file, "policies are written in Python"
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]


def workload_of(run: Run, data_dir: str | None) -> Workload:
    """The jobs of a run.

    Raises:
      ValueError: the trace is not there that the run is of.
    """
    path = trace_path(run.workload, data_dir)
    if (path.name if path else None) != run.trace:
        raise ValueError(f"trace={run.trace!r} must be in data_dir={data_dir!r}")
    jobs = make_workload(
        run.workload,
        n=run.n,
        seed=run.seed,
        rate=run.rate_rps or 1.0,
        data_dir=data_dir,
    )
    if run.rate_rps is None:
        jobs = with_arrivals(jobs, [0.0] * len(jobs))
    if run.scale == 1:
        return jobs
    return tuple(
        job._replace(
            prompt_tokens=max(1, job.prompt_tokens // run.scale),
            output_tokens=max(1, job.output_tokens // run.scale),
            chain=None,
        )
        for job in jobs
    )


def execute(run: Run, data_dir: str | None) -> dict[str, Any]:
    """Serve the run; its line in the file of results."""
    start = time.perf_counter()
    jobs = workload_of(run, data_dir)
    truth = {i: job.output_tokens for i, job in enumerate(jobs)}
    policy = get_policy(run.policy, truth=truth)
    if run.executor == "sim":
        requests, stats = simulate(jobs, run.engine, policy, run.cost)
    else:
        requests, stats = live_runs.serve(live_runs.smollm2(), jobs, run.engine, policy)
    budget = run.engine.max_num_batched_tokens
    chunk = min(budget, run.engine.max_chunk_tokens or budget)
    result = sweep_stats.measure(
        requests,
        [
            sweep_stats.alone_s(run.cost, chunk, job.prompt_tokens, job.output_tokens)
            for job in jobs
        ],
        preemptions=int(stats["preemptions"]),
        recomputed_tokens=int(stats["recomputed_tokens"]),
    )
    if run.rate_rps is None:
        result["admissions_per_s"] = sweep_stats.steady_rate(requests)
    wall_s = time.perf_counter() - start
    line = {"key": run.key, "run": dataclasses.asdict(run), "result": result}
    return line | {"wall_s": round(wall_s, 3)}
