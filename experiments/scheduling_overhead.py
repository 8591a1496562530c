"""What planning costs the host, by joins and leaves, waiting and running requests.

Measures the engine's own scheduling time of a launch (rank, plan and observe) on one
core, on a simulated device, launch by launch. Prints a JSON line for each point, and
tables of the median and the least in milliseconds: where the machine has other work,
the least is nearer to the truth. All joins and leaves of an iteration are one plan.

  python -m experiments.scheduling_overhead --policies='fcfs,sjf:oracle,hrrn'
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from absl import app, flags
from tqdm import tqdm

from experiments import common
from jaxserve.config import EngineConfig
from jaxserve.core import Event
from jaxserve.executors.cost_model import LinearCost
from jaxserve.scheduling.policies import get_policy, split_specs
from jaxserve.simulation import simulate
from jaxserve.workloads import Chain, Job

_POLICIES = flags.DEFINE_string(
    "policies",
    "fcfs,priority,edf,sjf:oracle,srpt:oracle,mlfq,fair_share,hrrn,"
    "prefix_affinity,prefix_sjf",
    "Specs, by commas.",
)
_REPEATS = flags.DEFINE_integer("repeats", 30, "Launches of a point.", lower_bound=2)
_PROMPT = flags.DEFINE_integer("prompt_tokens", 64, "Of each request.", lower_bound=1)

MOST_RUNNING = 256
BLOCK = 16
COUNTS = {
    "joins and leaves": (1, 4, 16, 64, 256),  # as many of each, of 256 running
    "waiting": (0, 10, 100, 1000),  # behind 256 that run
    "running": (1, 4, 16, 64, 256),  # none waits
}


class Point(NamedTuple):
    """Jobs that bring an engine to the state to be measured."""

    jobs: tuple[Job, ...]
    slots: int
    launches: Mapping[str, int]  # what the data of a launch to be measured hold


def _job(arrival_s: float, output_tokens: int, number: int) -> Job:
    """One of four users, three priorities and many deadlines, so that policies rank."""
    return Job(
        arrival_s,
        _PROMPT.value,
        output_tokens,
        user=str(number % 4),
        priority=number % 3,
        deadline_s=1e6 + number % 97,
        chain=Chain(tuple(range(_shared_tokens() // BLOCK)), BLOCK),
    )


def _shared_tokens() -> int:
    """Tokens that a prompt has in common with all others: half of it, whole blocks."""
    return _PROMPT.value // 2 // BLOCK * BLOCK


def point(axis: str, count: int, repeats: int) -> Point:
    """The jobs of one point; every step takes a second, and each has its own launch."""
    first = _job(0.0, 1, 0)  # leaves the shared blocks in the cache
    if axis != "joins and leaves":
        running, waiting = (count, 0) if axis == "running" else (MOST_RUNNING, count)
        # By priority and length none of those that wait may displace one that runs.
        jobs = [_job(1.0, repeats + 8, 0) for _ in range(running)]
        jobs += [_job(2.0, repeats + 9 + i % 7, 2 + i) for i in range(waiting)]
        state = {"running": running, "waiting": waiting, "prefill_tokens": 0}
        return Point((first, *jobs), running, state)
    # Cohorts of `count` requests of 4 tokens, one at the end of another. The first
    # comes with the rest.
    last = repeats + 2
    rest = [_job(1.0, 4 * last, 0) for _ in range(MOST_RUNNING - count)]
    cohorts = [_job(4.0 * n + 1, 4, i) for n in range(last) for i in range(count)]
    jobs = sorted(rest + cohorts, key=lambda job: job.arrival_s)
    state = {"prefill_tokens": count * (_PROMPT.value - _shared_tokens())}
    return Point((first, *jobs), MOST_RUNNING, state)


def measure(spec: str, axis: str, count: int, repeats: int) -> dict[str, Any]:
    """The host's time for launches of one point, in milliseconds."""
    made = point(axis, count, repeats)
    tokens = made.slots * (_PROMPT.value + 1)
    longest = max(job.prompt_tokens + job.output_tokens for job in made.jobs)
    config = EngineConfig(
        max_num_seqs=made.slots,
        max_num_batched_tokens=tokens,
        max_model_len=longest,
        block_size=BLOCK,
        num_blocks=made.slots * (longest // BLOCK + 1),
    )
    truth = {i: job.output_tokens for i, job in enumerate(made.jobs)}
    events: list[Event] = []
    simulate(
        made.jobs,
        config,
        get_policy(spec, truth=truth),
        LinearCost(fixed_s=1.0, token_s=0.0),
        jump=False,
        on_event=events.append,
    )
    launches = [e.data for e in events if e.kind == "launch"]
    wanted = [x for x in launches if made.launches.items() <= x.items()]
    times_ms = [1000 * x["host_s"] for x in wanted[1:]]  # the first one warms up
    return {
        "policy": spec,
        "axis": axis,
        "count": count,
        "launches": len(times_ms),
        "median_ms": statistics.median(times_ms),
        "least_ms": min(times_ms),
        "p90_ms": statistics.quantiles(times_ms, n=10)[-1],
    }


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    specs = split_specs(_POLICIES.value)
    todo = [(axis, n, spec) for axis in COUNTS for n in COUNTS[axis] for spec in specs]
    found: dict[tuple[str, int, str], str] = {}
    for axis, count, spec in tqdm(todo, desc="Points", disable=None):
        row = measure(spec, axis, count, _REPEATS.value)
        print(json.dumps(common.rounded(row)), flush=True)
        found[axis, count, spec] = f"{row['median_ms']:.2f} ({row['least_ms']:.2f})"
    for axis, counts in COUNTS.items():
        rows = [
            {axis: count, **{spec: found[axis, count, spec] for spec in specs}}
            for count in counts
        ]
        print(f"\nms a launch, median (least), by {axis}\n{common.table(rows)}")


if __name__ == "__main__":
    app.run(main)
