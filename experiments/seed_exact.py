"""Values that follow from arithmetic, computed by the engine on a simulated clock.

Prints each value as it should be and as it came out, and fails if one differs. Those
about scheduling are read off the engine's own metrics and events.

  python -m experiments.seed_exact
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from absl import app

from experiments import common
from jaxserve.config import EngineConfig
from jaxserve.core import Event
from jaxserve.executors.cost_model import LinearCost, StepCost
from jaxserve.kv_size import kv_bytes_per_token
from jaxserve.metrics import RequestMetrics, mean
from jaxserve.scheduling.policies import Policy, fcfs, get_policy
from jaxserve.simulation import simulate
from jaxserve.workloads import Chain, Job


class Check(NamedTuple):
    """A value as arithmetic has it, and as it was computed or measured."""

    name: str
    expected: float
    measured: float

    @property
    def holds(self) -> bool:
        """Equal but for rounding: sums of binary fractions, and 1 ns of arrivals."""
        return math.isclose(self.measured, self.expected, rel_tol=1e-6)


class Ran(NamedTuple):
    """What a simulation showed."""

    requests: list[RequestMetrics]  # in the order of the jobs
    launches: list[Mapping[str, Any]]  # data of the launches that ran a step

    def e2e_ms(self) -> list[float]:
        """Milliseconds from arrival to the end of each."""
        return [1000 * (r.e2e_s or math.nan) for r in self.requests]


def run(
    jobs: Sequence[Job], cost: StepCost, policy: Policy | None = None, **fields: Any
) -> Ran:
    """Serve the jobs on an engine with blocks for all of them."""
    events: list[Event] = []
    options: dict[str, Any] = {"num_blocks": 4096, **fields}
    config = EngineConfig(**options)
    done = simulate(tuple(jobs), config, policy or fcfs(), cost, on_event=events.append)
    launches = [e.data for e in events if e.kind == "launch" and e.data["steps"]]
    return Ran(done.requests, launches)


def each_step(milliseconds: float) -> LinearCost:
    """Every step takes the same time, whatever is in it."""
    return LinearCost(fixed_s=milliseconds / 1000, token_s=0.0)


def kv_sizes() -> Iterator[Check]:
    """KV bytes of a token in 16 bits; 70B also as if each query head had its own."""
    shapes = {  # layers, KV heads, head size
        "Llama-2-7B": (524_288, (32, 32, 128)),
        "Llama-2-13B": (819_200, (40, 40, 128)),
        "Llama-2-70B as MHA": (2_621_440, (80, 64, 128)),
        "Llama-2-70B": (327_680, (80, 8, 128)),
        "Llama-3-8B": (131_072, (32, 8, 128)),
    }
    for name, (expected, shape) in shapes.items():
        yield Check(f"KV bytes/token, {name}", expected, kv_bytes_per_token(*shape))


def overhead_percent(overhead_ms: float, step_ms: float, steps: int) -> float:
    """Time that planning would add to 500 steps, were it so long for each launch."""
    done = run([Job(0.0, 1, 500)], each_step(step_ms), num_scheduler_steps=steps)
    return 100 * len(done.launches) * overhead_ms / done.e2e_ms()[0]


def n_step_scheduling() -> Iterator[Check]:
    """Planning every 5 steps of 15 ms, while one request runs all the time."""
    yield Check("0.5 ms a 15 ms step, %", 10 / 3, overhead_percent(0.5, 15, 1))
    yield Check("0.5 ms every 5 of them, %", 2 / 3, overhead_percent(0.5, 15, 5))
    yield Check("1 ms a 10 ms step, %", 10.0, overhead_percent(1, 10, 1))
    # One after another, at 15 phases of a launch: 1 ns, 5 ms, ..., 70 ms after a plan,
    # with outputs that end in each of its steps.
    phases_s = [max(1e-9, 0.005 * i) for i in range(15)]
    probes = [
        Job(0.075 * 3 * (5 * i + tokens) + phase_s, 1, tokens)
        for i, phase_s in enumerate(phases_s)
        for tokens in (1, 2, 3, 4, 5)
    ]
    busy = [Job(0.0, 1, 1500), Job(0.0, 1, 496)]
    done = run(busy + probes, each_step(15), num_scheduler_steps=5, max_num_seqs=3)
    waits = done.requests[len(busy) :]
    finish = [1000 * (r.finish_delay_s or 0.0) for r in waits]
    admission = [1000 * (r.admission_delay_s or 0.0) for r in waits]
    yield Check("longest wait to finish, ms", 60.0, max(finish))
    yield Check("mean wait to finish, ms", 30.0, mean(finish) or 0.0)
    yield Check("longest wait for admission, ms", 75.0, max(admission))
    late_ms, e2e_ms = 1000 * (done.requests[1].finish_delay_s or 0), done.e2e_ms()[1]
    yield Check("E2E of 496 tokens, ms", 7500.0, e2e_ms)
    yield Check("its wait to finish, %", 0.8, 100 * late_ms / e2e_ms)


def static_or_continuous() -> Iterator[Check]:
    """8 requests of 100 tokens and 2 of 1000 in one batch, at 10 ms a step."""
    jobs = [Job(0.0, 1, 100)] * 8 + [Job(0.0, 1, 1000)] * 2
    for batching, short, all_ten in (
        ("static", 10_000.0, 10_000.0),
        ("continuous", 1_000.0, 2_800.0),
    ):
        e2e = run(jobs, each_step(10), batching=batching, max_num_seqs=10).e2e_ms()
        yield Check(f"{batching}: first to end, ms", short, min(e2e))
        yield Check(f"{batching}: last of the short, ms", short, max(e2e[:8]))
        yield Check(f"{batching}: long, ms", 10_000.0, min(e2e[8:]))
        yield Check(f"{batching}: last to end, ms", 10_000.0, max(e2e))
        yield Check(f"{batching}: mean, ms", all_ten, mean(e2e) or 0.0)


def tail_padding() -> Iterator[Check]:
    """9 requests of 50 tokens and 1 of 500 in one static batch."""
    jobs = [Job(0.0, 1, 50)] * 9 + [Job(0.0, 1, 500)]
    done = run(jobs, each_step(10), batching="static", max_num_seqs=10)
    rows = [row for launch in done.launches for row in launch["slots"]]
    used = sum(tokens for _, _, tokens in rows)
    yield Check("static batch: slot steps", 5000, len(rows))
    yield Check("static batch: slot steps used, %", 19.0, 100 * used / len(rows))


def prefill_stall() -> Iterator[Check]:
    """A prompt of 2,000 tokens at 0.25 ms each comes while 10 requests decode.

    Chunks take as long in all. Yet each carries a token of every decoder: the step that
    they would have had anyhow hides behind the chunk, and nobody pauses for long.
    """
    cost = LinearCost(fixed_s=0.0, token_s=0.00025, floor_s=0.010)
    decoders = [Job(0.0, 1, 200)] * 10
    calm = run(decoders, cost)
    for prefill, budget, stall_s, gap_ms in (
        ("prefill_first", 2048, 5.0, 510.0),
        ("chunked", 512, 4.7, 128.0),
    ):
        done = run(
            [*decoders, Job(0.5, 2000, 1)],
            cost,
            prefill=prefill,
            max_num_batched_tokens=budget,
        )
        late = (a - b for a, b in zip(done.e2e_ms(), calm.e2e_ms(), strict=False))
        gaps = [gap for r in done.requests[:10] for gap in r.itl_s]
        yield Check(f"{prefill}: decoders' delay, s", stall_s, sum(late) / 1000)
        yield Check(f"{prefill}: longest gap, ms", gap_ms, 1000 * max(gaps))


def prefix_reuse() -> Iterator[Check]:
    """Two prompts of 200 tokens that share their first 10 blocks of 16."""
    jobs = [
        Job(float(i), 200, 4, chain=Chain((*range(10), 10 + i), 16)) for i in range(2)
    ]
    done = run(jobs, each_step(10), block_size=16)
    computed = sum(launch["prefill_tokens"] for launch in done.launches)
    yield Check("tokens reused of 10 blocks", 160, done.requests[1].cached_tokens)
    yield Check("prompt tokens computed of 400", 240, computed)


def shortest_first() -> Iterator[Check]:
    """Outputs of 10, 2 and 1 tokens, one slot, a second a token (vLLM-LTR, 2024)."""
    jobs = [Job(0.0, 1, n) for n in (10, 2, 1)]
    sjf = get_policy("sjf:oracle", truth={0: 10, 1: 2, 2: 1})
    for name, policy, expected in (
        ("FCFS", fcfs(), (1.0, 6.0, 13.0)),
        ("SJF", sjf, (1.3, 1.5, 1.0)),
    ):
        done = run(jobs, each_step(1000), policy, max_num_seqs=1)
        each = [
            ms / 1000 / job.output_tokens
            for ms, job in zip(done.e2e_ms(), jobs, strict=True)
        ]
        for job, one, other in zip(jobs, expected, each, strict=True):
            yield Check(f"{name}: s/token of {job.output_tokens}", one, other)
        yield Check(f"{name}: mean s/token", sum(expected) / 3, mean(each) or 0.0)


CHECKS: tuple[Callable[[], Iterator[Check]], ...] = (
    kv_sizes,
    n_step_scheduling,
    static_or_continuous,
    tail_padding,
    prefill_stall,
    prefix_reuse,
    shortest_first,
)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    checks = [check for group in CHECKS for check in group()]
    rows = [
        {
            "name": check.name,
            "expected": f"{check.expected:,.7g}",
            "measured": f"{check.measured:,.7g}",
            "": "" if check.holds else "DIFFERS",
        }
        for check in checks
    ]
    print(common.table(rows))
    misses = [check.name for check in checks if not check.holds]
    if misses:
        raise SystemExit(f"{len(misses)} of {len(checks)} values differ: {misses}")


if __name__ == "__main__":
    app.run(main)
