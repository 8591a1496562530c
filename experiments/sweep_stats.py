"""What a run of the sweep came to, and how two policies compare over paired seeds.

Owns the measures of the tables and their intervals. Never sees a policy or an engine.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxserve import metrics
from jaxserve.executors.cost_model import LinearCost
from jaxserve.metrics import RequestMetrics

LATENCIES: dict[str, Callable[[RequestMetrics], float | None]] = {
    "ttft_s": lambda r: r.ttft_s,
    "tpot_s": lambda r: r.tpot_s,
    "max_itl_s": lambda r: r.max_itl_s,
    "e2e_s": lambda r: r.e2e_s,
    "s_per_token": lambda r: r.normalized_latency_s,
}
"""Of each request; a run has the mean, the median and the 99th percentile of each, and
of "slowdown"."""

DRAWS = 10_000
"""Bootstrap resamples."""


def alone_s(
    cost: LinearCost, chunk_tokens: int, prompt_tokens: int, output_tokens: int
) -> float:
    """E2E of a request that has an idle engine to itself, nothing cached.

    Args:
      chunk_tokens: most prompt tokens of a step.
    """
    whole, rest = divmod(prompt_tokens, chunk_tokens)
    prefill_s = whole * cost.step_s(chunk_tokens, 0, 0)
    prefill_s += cost.step_s(rest, 0, 0) if rest else 0.0
    decodes = output_tokens - 1  # the last chunk's step samples the first token
    context = decodes * prompt_tokens + decodes * (decodes + 1) // 2
    decode_s = decodes * cost.step_s(0, 1, 0) + cost.context_token_s * context
    return prefill_s + decode_s


def service_by_user(
    requests: Sequence[RequestMetrics], until_s: float
) -> dict[str, float]:
    """What each user had got by then: prompt tokens of admitted requests, and output
    tokens, which count twice (the prices of Sheng et al., OSDI 2024)."""
    service: dict[str, float] = defaultdict(float)
    for r in requests:
        if r.user is None:
            continue
        admitted = r.admitted_s is not None and r.admitted_s <= until_s
        outputs = sum(t <= until_s for t in r.token_times_s)
        service[r.user] += admitted * r.prompt_tokens + 2 * outputs
    return service


def measure(
    requests: Sequence[RequestMetrics],
    alone: Sequence[float],
    *,
    preemptions: int,
    recomputed_tokens: int,
) -> dict[str, float | None]:
    """One run as numbers.

    Throughput is over the span from the first arrival to the last end. Jain's index is
    of the users' service until the last arrival, for afterwards the backlog drains and
    everybody gets all that he asked for. starvation_s is the longest time that any
    request waited without a token, for its first or its next.

    Args:
      requests: all of them, ended. alone: `alone_s` of each.
    """
    columns = {
        name: [v for r in requests if (v := of(r)) is not None]
        for name, of in LATENCIES.items()
    }
    pairs = zip(requests, alone, strict=True)
    columns["slowdown"] = [v for r, a in pairs if (v := r.slowdown(a)) is not None]
    result: dict[str, float | None] = {}
    for name, values in columns.items():
        result[f"{name}_mean"] = metrics.mean(values)
        result[f"{name}_p50"] = metrics.percentile(values, 50)
        result[f"{name}_p99"] = metrics.percentile(values, 99)
    arrivals = [r.arrival_s for r in requests if r.arrival_s is not None]
    span_s = max(r.finished_s or 0.0 for r in requests) - min(arrivals)
    service = service_by_user(requests, until_s=max(arrivals))
    waits = [w for r in requests if (w := r.longest_wait_s) is not None]
    return result | {
        "output_tokens_per_s": sum(r.output_tokens for r in requests) / span_s,
        "requests_per_s": len(requests) / span_s,
        "jain": metrics.jain(list(service.values())),
        "preemptions": preemptions,
        "recomputed_tokens": recomputed_tokens,
        "starvation_s": max(waits, default=None),
    }


def steady_rate(requests: Sequence[RequestMetrics]) -> float:
    """Admissions per second while all slots are full and the queue is not empty.

    Args:
      requests: arrived all at once, many more than there are slots. The first quarter
        of the admissions fills and mixes the slots, and does not count.

    Raises:
      ValueError: no time passed between the rest, so few are they.
    """
    times = sorted(r.admitted_s for r in requests if r.admitted_s is not None)
    start_s, end_s = times[len(times) // 4], times[-1]
    if end_s <= start_s:
        raise ValueError(
            f"{len(times)} requests must be many more than the slots; raise n or lower "
            "max_num_seqs"
        )
    return sum(t > start_s for t in times) / (end_s - start_s)


def bootstrap(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % percentile interval of the mean; None of fewer than two values.

    Resampled from a fixed seed. Over 5 values it covers the truth less often than it
    says, about 4 times in 5: read it beside the range.
    """
    if len(values) < 2:
        return None
    rng = np.random.default_rng(0)
    picks = rng.integers(len(values), size=(DRAWS, len(values)))
    low, high = np.quantile(np.asarray(values)[picks].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)


class Ratio(NamedTuple):
    """How many times shorter a latency is than under the first policy."""

    mean: float  # geometric: swapping the two policies inverts it
    interval: tuple[float, float] | None  # 95 %, by bootstrap over seeds
    low: float  # of the seeds
    high: float


def paired(base: Sequence[float | None], other: Sequence[float | None]) -> Ratio | None:
    """The ratio base / other, seed by seed; None where it is not defined.

    Args:
      base, other: the same measure of the same seeds under the two policies.
    """
    pairs = list(zip(base, other, strict=True))
    if not pairs or not all(a and b for a, b in pairs):
        return None
    logs = [math.log(a / b) for a, b in pairs if a and b]
    interval = bootstrap(logs)
    return Ratio(
        math.exp(sum(logs) / len(logs)),
        None if interval is None else (math.exp(interval[0]), math.exp(interval[1])),
        math.exp(min(logs)),
        math.exp(max(logs)),
    )
