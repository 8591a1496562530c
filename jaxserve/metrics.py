"""Events in, measurements out: pure functions over `core.Event`.

Owns every definition of a latency, a rate and a share. Never sees the engine.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from jaxserve.core import Event


@dataclasses.dataclass(frozen=True)
class RequestMetrics:
    """Times of one request, in seconds on the engine's clock, and its token counts.

    Attributes:
      arrival_s, admitted_s, finished_s: None until then. admitted_s is the first time.
      finish_reason: "stop", "length" or "abort"; None while it runs.
      prompt_tokens, cached_tokens: of the prompt, and those found at first admission.
      preemptions: how often it lost its slot.
      seen_s: when a plan first saw it.
      finish_delay_s: from its last token to its end: the rest of the launch that
        sampled it, or of a static batch.
      user, priority, deadline_s: as submitted.
      token_times_s: when each output token was read; tokens of a launch share a time.
    """

    arrival_s: float | None = None
    admitted_s: float | None = None
    finished_s: float | None = None
    finish_reason: str | None = None
    token_times_s: tuple[float, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    seen_s: float | None = None
    finish_delay_s: float | None = None
    user: str | None = None
    priority: int = 0
    deadline_s: float | None = None

    @property
    def output_tokens(self) -> int:
        """Output tokens, each counted once however often its KV was computed."""
        return len(self.token_times_s)

    @property
    def queue_s(self) -> float | None:
        """Arrival to first admission."""
        return _gap(self.arrival_s, self.admitted_s)

    @property
    def admission_delay_s(self) -> float | None:
        """Arrival to the first plan that saw it: what scheduling every N steps costs a
        newcomer, whether or not that plan had room for it."""
        return _gap(self.arrival_s, self.seen_s)

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, from arrival."""
        first = self.token_times_s[0] if self.token_times_s else None
        return _gap(self.arrival_s, first)

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None with fewer than two tokens."""
        times = self.token_times_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    @property
    def itl_s(self) -> tuple[float, ...]:
        """Inter-token latencies: the gaps between consecutive tokens."""
        times = self.token_times_s
        return tuple(b - a for a, b in zip(times, times[1:], strict=False))

    @property
    def e2e_s(self) -> float | None:
        """Arrival to the end."""
        return _gap(self.arrival_s, self.finished_s)

    @property
    def max_itl_s(self) -> float | None:
        """The longest pause between two tokens; None with fewer than two."""
        return max(self.itl_s, default=None)

    @property
    def normalized_latency_s(self) -> float | None:
        """Seconds per output token, E2E over all of them (Orca, Yu et al. 2022)."""
        if self.e2e_s is None or not self.token_times_s:
            return None
        return self.e2e_s / self.output_tokens

    @property
    def longest_wait_s(self) -> float | None:
        """The longest time without a token: to the first one, or between two."""
        if self.ttft_s is None:
            return None
        return max(self.ttft_s, self.max_itl_s or 0.0)

    def slowdown(self, alone_s: float) -> float | None:
        """E2E over `alone_s`, what it would be on an idle engine."""
        return None if self.e2e_s is None else self.e2e_s / alone_s


def _gap(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


def advance(metrics: RequestMetrics, event: Event) -> RequestMetrics:
    """The metrics of the event's request after the event."""
    data = event.data
    if event.kind == "arrived":
        return dataclasses.replace(
            metrics,
            arrival_s=data["arrival_s"],
            seen_s=event.time_s,
            prompt_tokens=data["prompt_tokens"],
            priority=data["priority"],
            user=data["user"],
            deadline_s=data["deadline_s"],
        )
    if event.kind == "admitted" and data["first"]:
        return dataclasses.replace(
            metrics, admitted_s=event.time_s, cached_tokens=data["cached_tokens"]
        )
    if event.kind == "progressed" and data["output_tokens"]:
        times = (event.time_s,) * data["output_tokens"]
        return dataclasses.replace(metrics, token_times_s=metrics.token_times_s + times)
    if event.kind == "preempted":
        return dataclasses.replace(metrics, preemptions=metrics.preemptions + 1)
    if event.kind == "finished":
        return dataclasses.replace(
            metrics,
            finished_s=event.time_s,
            finish_reason=data["reason"],
            finish_delay_s=data["finish_delay_s"],
        )
    return metrics


def by_request(events: Iterable[Event]) -> dict[str, RequestMetrics]:
    """Metrics of each request, by id; an id that comes again is `id#2`, `id#3`."""
    done: dict[str, RequestMetrics] = {}
    name: dict[int, str] = {}  # by submission index
    uses: Counter[str] = Counter()
    for event in events:
        if event.request_id is None:
            continue
        index = event.data["index"]
        if index not in name:
            uses[event.request_id] += 1
            n = uses[event.request_id]
            name[index] = event.request_id if n == 1 else f"{event.request_id}#{n}"
            done[name[index]] = RequestMetrics()
        done[name[index]] = advance(done[name[index]], event)
    return done


def percentile(values: Sequence[float], q: float) -> float | None:
    """The q-th percentile (0..100) by linear interpolation; None of no values."""
    if not values:
        return None
    ordered = sorted(values)
    at = (len(ordered) - 1) * q / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def mean(values: Sequence[float]) -> float | None:
    """The mean; None of no values, rather than 0 or NaN."""
    return sum(values) / len(values) if values else None


def jain(values: Sequence[float]) -> float | None:
    """Jain's fairness index, (sum x)^2 / (n sum x^2): 1 of equal shares, 1 / n if one
    has all; None of no values or of zeros alone (Jain, Chiu and Hawe 1984)."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else None


def summary(events: Sequence[Event]) -> dict[str, Any]:
    """Totals and distributions of a run; a measurement nobody made is None.

    Throughput is over the span from the first arrival to the last token or end. The hit
    rate is of prompt tokens at first admissions: resumed requests neither raise nor
    lower it. Aborted requests count, but their E2E latency is nobody's.
    """
    requests = list(by_request(events).values())
    launches = [e.data for e in events if e.kind == "launch"]
    ended = [r for r in requests if r.finished_s is not None]
    starts = [r.arrival_s for r in requests if r.arrival_s is not None]
    ends = [r.finished_s for r in requests if r.finished_s is not None]
    ends += [r.token_times_s[-1] for r in requests if r.token_times_s]
    span_s = max(ends) - min(starts) if starts and ends else None
    admitted = [r for r in requests if r.admitted_s is not None]
    queries = sum(r.prompt_tokens for r in admitted)
    hits = sum(r.cached_tokens for r in admitted)
    output = sum(r.output_tokens for r in requests)
    result: dict[str, Any] = {
        "requests": len(requests),
        "finished": len(ended),
        "prompt_tokens": sum(r.prompt_tokens for r in requests),
        "output_tokens": output,
        "span_s": span_s,
        "output_tokens_per_s": output / span_s if span_s else None,
        "prefix_hit_rate": hits / queries if queries else None,
        "preemptions": sum(r.preemptions for r in requests),
        "launches": len(launches),
        "steps": sum(x["steps"] for x in launches),
        "padded_tokens": sum(x["padded_tokens"] for x in launches),
        "compiles": sum(x["compiles"] for x in launches),
        "host_s_per_step": mean([x["host_s"] / max(x["steps"], 1) for x in launches]),
    }
    whole = [r for r in requests if r.finish_reason != "abort"]
    for field in (
        "admission_delay_s",
        "queue_s",
        "ttft_s",
        "tpot_s",
        "finish_delay_s",
        "e2e_s",
    ):
        measured = whole if field == "e2e_s" else requests
        values = [v for r in measured if (v := getattr(r, field)) is not None]
        result |= _spread(field, values)
    return result | _spread("itl_s", [gap for r in requests for gap in r.itl_s])


def _spread(name: str, values: Sequence[float]) -> dict[str, float | None]:
    return {
        f"{name}_mean": mean(values),
        f"{name}_p50": percentile(values, 50),
        f"{name}_p99": percentile(values, 99),
    }
