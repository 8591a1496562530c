"""The sweep in small: FCFS, SJF and MLFQ on SmolLM2, one burst of requests.

Owns the burst and its picture. SJF knows the lengths, which a real server would have to
guess.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from absl import app, logging
from tqdm import tqdm

from experiments import common, live_runs
from experiments.pictures import COLORS, MARKERS, save
from jaxserve import EngineConfig, metrics
from jaxserve.metrics import RequestMetrics
from jaxserve.scheduling.policies import get_policy
from jaxserve.workloads import Job, Workload, lengths
from jaxserve.workloads.jobs import streams

POLICIES = {
    "fcfs": "fcfs",
    "sjf, lengths known": "sjf:oracle",
    "mlfq, quanta 16 and 48": "mlfq(quanta=(16, 48))",
}
"""By the name they are shown under. Outputs are short here, and so are the quanta."""


def burst(n: int) -> Workload:
    """n requests at once: 8 to 40 prompt tokens, 8 to 96 output tokens, mostly few."""
    random = streams(0)
    prompts = lengths.uniform(8, 40)(random.prompts.random(n)).tolist()
    outputs = lengths.lognormal(20, 1.0, cap=96)(random.outputs.random(n)).tolist()
    return tuple(Job(0.0, p, max(8, o)) for p, o in zip(prompts, outputs, strict=True))


def row(name: str, requests: Sequence[RequestMetrics]) -> dict[str, str | float | None]:
    """One line of the table."""
    ttft = [r.ttft_s for r in requests if r.ttft_s is not None]
    e2e = [r.e2e_s for r in requests if r.e2e_s is not None]
    per_token = [x for r in requests if (x := r.normalized_latency_s) is not None]
    return {
        "policy": name,
        "TTFT s": metrics.mean(ttft),
        "TTFT P99": metrics.percentile(ttft, 99),
        "E2E s": metrics.mean(e2e),
        "E2E P99": metrics.percentile(e2e, 99),
        "E2E s/token": metrics.mean(per_token),
        "preempted": sum(r.preemptions for r in requests),
    }


def draw(runs: Mapping[str, Sequence[RequestMetrics]], path: Path) -> None:
    """Requests that have ended, over time; and E2E by output length."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for i, (name, requests) in enumerate(runs.items()):
        color, marker = COLORS[i], MARKERS[i]
        begin_s = min(r.arrival_s or 0.0 for r in requests)
        ends = sorted((r.finished_s or 0.0) - begin_s for r in requests)
        left.step([0.0, *ends], range(len(ends) + 1), where="post", color=color)
        right.scatter(
            [r.output_tokens for r in requests],
            [r.e2e_s or 0.0 for r in requests],
            s=18,
            color=color,
            marker=marker,
            alpha=0.8,
            label=name,
        )
    left.set(xlabel="seconds since the burst", ylabel="requests that have ended")
    right.set(xlabel="output tokens", ylabel="E2E (s)", ylim=(0, None))
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=len(runs))
    save(figure, path)


def small_table(
    loaded: live_runs.Loaded, config: EngineConfig, path: Path, *, n: int = 32
) -> str:
    """Serve the burst under each policy; the table. The picture goes to `path`.

    Args:
      config: at least 136 tokens a request. With the config of an engine that ran
        before, nothing is compiled.
      n: requests; several times the slots, so that a queue waits to be ordered.
    """
    jobs = burst(n)
    truth = {i: job.output_tokens for i, job in enumerate(jobs)}
    runs: dict[str, list[RequestMetrics]] = {}
    with tqdm(total=n * len(POLICIES), desc="Policies", disable=None) as bar:
        for name, spec in POLICIES.items():
            policy = get_policy(spec, truth=truth)
            runs[name] = live_runs.serve(
                loaded, jobs, config, policy, progress=bar.update
            ).requests
    draw(runs, path)
    return common.table([row(name, requests) for name, requests in runs.items()])


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    logging.set_verbosity(logging.WARNING)  # JAX tells which backends it tried
    config = EngineConfig(max_model_len=1024, max_num_seqs=8, num_blocks=72)
    path = Path("demo/policies.png")
    print(small_table(live_runs.smollm2(), config, path) + f"\n\nwrote {path}")


if __name__ == "__main__":
    app.run(main)
