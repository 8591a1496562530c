"""How many steps a second the simulator runs, and how many launches it plans.

One process, one core. A burst keeps every slot busy and a thousand requests waiting.
Planned launches are counted with jumps off, steps with jumps on; both serve the same.

  python -m experiments.simulator_speed --policies=fcfs,mlfq
"""

from __future__ import annotations

import time
from typing import Any

from absl import app, flags, logging
from tqdm import tqdm

from experiments import common
from jaxserve import EngineConfig
from jaxserve.executors.cost_model import get_profile
from jaxserve.scheduling.policies import get_policy, split_specs
from jaxserve.simulation import simulate
from jaxserve.workloads import Workload, make_workload, with_arrivals

_POLICIES = flags.DEFINE_string("policies", "fcfs,mlfq", "Specs, with commas between.")
_WAITING = flags.DEFINE_integer("waiting", 1000, "Requests that wait at the start.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Runs of each; the best counts.")


def run(spec: str, jobs: Workload, *, jump: bool) -> dict[str, Any]:
    """Steps and launches a second of one run, from its first to its last request."""
    truth = {i: job.output_tokens for i, job in enumerate(jobs)}
    config = EngineConfig(
        max_model_len=8192,
        max_num_seqs=common.MAX_NUM_SEQS.value,
        num_blocks=common.MAX_NUM_SEQS.value * 512,
        enable_prefix_caching=False,
    )
    policy, cost = get_policy(spec, truth=truth), get_profile("a100-8b")
    start = time.perf_counter()
    stats = simulate(jobs, config, policy, cost, jump=jump).stats
    seconds = time.perf_counter() - start
    return {
        "policy": spec,
        "jumps": jump,
        "steps/s": stats["steps"] / seconds,
        "steps": stats["steps"],
        "preempted": stats["preemptions"],
        "wall s": seconds,
    }


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    logging.set_verbosity(logging.WARNING)
    n = common.MAX_NUM_SEQS.value + _WAITING.value
    jobs = make_workload("W3", n=n, seed=0, rate=1.0)
    jobs = with_arrivals(jobs, [0.0] * n)
    rows = []
    for spec in tqdm(split_specs(_POLICIES.value), desc="Policies", disable=None):
        for jump in (False, True):
            runs = [run(spec, jobs, jump=jump) for _ in range(_ROUNDS.value)]
            rows.append(max(runs, key=lambda row: row["steps/s"]))
    print(common.table(rows))


if __name__ == "__main__":
    app.run(main)
