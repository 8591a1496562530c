"""Fit a linear cost profile to the engine's own step log, and test it on another run.

Serves bursts of requests of varied lengths on SmolLM2, twice. The launches of the first
time give the profile; the second, of other lengths, is predicted launch by launch from
its own log, and by a simulation that knows the workload and the profile alone. Rounds
of both run the same launches; each counts at its fastest, so that what else the machine
does in one round does not show.

A launch takes from one read to the next, so the host's planning is part of it. Its
context tokens, which the log does not tell, follow from it: a decode row attends to its
prompt and the outputs before it, and to the token that it computes.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from absl import app, flags, logging

from experiments import common, live_runs
from jaxserve import EngineConfig
from jaxserve.core import Event
from jaxserve.executors.cost_model import LinearCost
from jaxserve.scheduling.policies import fcfs
from jaxserve.simulation import simulate
from jaxserve.workloads import Job, Workload, lengths
from jaxserve.workloads.jobs import streams

_ROUNDS = flags.DEFINE_integer("rounds", 3, "Of both, interleaved.", lower_bound=1)
_NAME = flags.DEFINE_string("name", "smollm2-cpu", "Of the profile that is printed.")
_PROVENANCE = flags.DEFINE_string("provenance", "", "Machine and versions, in words.")
_DATE = flags.DEFINE_string("date", "", "When it was measured.")

SIZES = (1, 1, 2, 4, 8, 16, 64)
"""Requests of each burst, so that the log holds batches of all sizes."""

CONFIG = EngineConfig(
    max_model_len=1024, max_num_seqs=32, num_blocks=1280, enable_prefix_caching=False
)


class Step(NamedTuple):
    """One launch of one step, as the cost model sees it."""

    chunk_tokens: int
    rows: int  # decode rows
    context_tokens: int
    seconds: float


def steps(events: Sequence[Event]) -> list[Step]:
    """The launches of a run in which the engine was never idle and N was 1."""
    length: dict[int, int] = {}  # KV rows by slot
    found: list[Step] = []
    began_s = None
    for event in events:
        data = event.data
        if event.kind == "admitted":
            length[data["slot"]] = data["cached_tokens"]
        if event.kind != "launch" or not data["token_bucket"]:
            continue  # a launch without tokens gives blocks back when all is done
        context = 0
        for slot, prompt_tokens, _ in data["slots"]:
            length[slot] += prompt_tokens or 1
            context += 0 if prompt_tokens else length[slot]
        began_s = data["submitted_s"] if began_s is None else began_s
        seconds, began_s = event.time_s - began_s, event.time_s
        tokens = data["prefill_tokens"], data["decode_rows"]
        found.append(Step(*tokens, context, seconds))
    return found


def least_squares(log: Sequence[Step]) -> tuple[LinearCost, float]:
    """The costs >= 0 that fit best, and R^2, the share of variance they explain."""
    ones = np.ones(len(log))
    tokens = np.array([step.chunk_tokens + step.rows for step in log], float)
    context = np.array([step.context_tokens for step in log], float)
    seconds = np.array([step.seconds for step in log])
    columns = np.stack([ones, tokens, context], axis=1)

    def fit(used: tuple[int, ...]) -> np.ndarray:
        found = np.zeros(3)
        found[list(used)] = np.linalg.lstsq(columns[:, used], seconds, rcond=None)[0]
        return found

    # The constrained optimum is the free one over some subset of the columns.
    subsets = [u for n in (1, 2, 3) for u in itertools.combinations(range(3), n)]
    fits = [found for found in map(fit, subsets) if (found >= 0).all()]

    def residual(found: np.ndarray) -> float:
        return float(np.square(columns @ found - seconds).sum())

    best = min(fits, key=residual)
    spread = float(np.square(seconds - seconds.mean()).sum())
    return LinearCost(*best.tolist()), 1 - residual(best) / spread


def bursts(seed: int) -> list[Workload]:
    """Bursts of SIZES; 16 to 512 prompt tokens, 8 to 128 output tokens."""
    random, n = streams(seed), sum(SIZES)
    prompts = lengths.uniform(16, 512)(random.prompts.random(n)).tolist()
    outputs = lengths.uniform(8, 128)(random.outputs.random(n)).tolist()
    jobs = [Job(0.0, *row) for row in zip(prompts, outputs, strict=True)]
    cuts = itertools.pairwise(itertools.accumulate(SIZES, initial=0))
    return [tuple(jobs[a:b]) for a, b in cuts]


def serve(seed: int) -> list[Step]:
    """The steps of all bursts of a seed, each served when the one before has ended."""
    log: list[Step] = []
    for workload in bursts(seed):
        events: list[Event] = []
        live_runs.serve(
            live_runs.smollm2(), workload, CONFIG, fcfs(), on_event=events.append
        )
        log += steps(events)
    return log


def undisturbed(logs: Sequence[Sequence[Step]]) -> list[Step]:
    """Each step at its fastest, over rounds of the same steps."""
    rounds = zip(*logs, strict=True)
    return [min(same, key=lambda step: step.seconds) for same in rounds]


def simulated_s(seed: int, cost: LinearCost) -> float:
    """How long a simulation says that the bursts of a seed take."""
    runs = [simulate(workload, CONFIG, fcfs(), cost) for workload in bursts(seed)]
    return sum(max(r.finished_s or 0.0 for r in run.requests) for run in runs)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    logging.set_verbosity(logging.WARNING)  # JAX tells which backends it tried
    served = [(serve(seed=0), serve(seed=1)) for _ in range(_ROUNDS.value)]
    fitted, other = map(undisturbed, zip(*served, strict=True))
    cost, r2 = least_squares(fitted)
    rows = []
    for name, seed, log in (("fitted", 0, fitted), ("held out", 1, other)):
        measured = sum(step.seconds for step in log)
        from_log = sum(cost.step_s(*step[:3]) for step in log)
        simulated = simulated_s(seed, cost)
        rows.append(
            {
                "run": name,
                "steps": len(log),
                "measured s": measured,
                "from its log s": from_log,
                "error %": 100 * (from_log / measured - 1),
                "simulated s": simulated,
                "its error %": 100 * (simulated / measured - 1),
            }
        )
    about = {"provenance": _PROVENANCE.value, "date": _DATE.value}
    costs = common.rounded(dataclasses.asdict(cost))
    print(json.dumps({_NAME.value: costs | about}, indent=2))
    print(f"\nR^2 {r2:.3f} over {len(fitted)} steps\n\n{common.table(rows)}")


if __name__ == "__main__":
    app.run(main)
