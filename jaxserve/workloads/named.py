"""The workloads of the sweep, by name.

Owns what each name stands for. Traces are read where a folder holds them; elsewhere
their twins take their place, which `trace_path` tells. The load is the caller's.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxserve.workloads import arrivals, checks, lengths, sessions, traces
from jaxserve.workloads.jobs import Job, Streams, Workload, streams, with_arrivals
from jaxserve.workloads.twins import ARENA_CLIENTS, TWINS

CHAT_PROMPTS = lengths.lognormal(median=70, sigma=1.2, cap=2048)
"""Prompts of a chat without history: mean about 140 tokens."""

_Source = pathlib.Path | None
_Make = Callable[[int, float, Streams, _Source], Workload]


class Spec(NamedTuple):
    """A named workload.

    Attributes:
      make: (n, requests per second, streams, trace or None) to a workload.
      rate_rps: its own rate; None: the caller must give one. Infinite: all at time 0,
        and no other will do.
      file: the trace it reads where there is one.
    """

    make: _Make
    rate_rps: float | None = None
    file: str | None = None


def _jobs(
    times: np.ndarray,
    prompts: np.ndarray,
    outputs: np.ndarray,
    tags: Sequence[Mapping[str, str] | None] | None = None,
) -> Workload:
    told = tags or [None] * len(times)
    rows = zip(times.tolist(), prompts.tolist(), outputs.tolist(), told, strict=True)
    return tuple(Job(t, i, o, tags=tag) for t, i, o, tag in rows)


def _chat(n: int, rate: float, random: Streams, path: _Source) -> Workload:
    """LMSYS outputs, drawn from the file with its predictions or from the twin."""
    if rate == np.inf:
        times = arrivals.all_at_once(n)
    else:
        times = arrivals.poisson(n, rate, random.arrivals)
    prompts = CHAT_PROMPTS(random.prompts.random(n))
    u = random.outputs.random(n)
    if path is None:
        return _jobs(times, prompts, TWINS["lmsys"].outputs(u))
    outputs = traces.read_lmsys_outputs(path)
    rows = np.floor(u * len(outputs.tokens)).astype(int)
    tags = [outputs.tags[row] for row in rows]
    return _jobs(times, prompts, np.array(outputs.tokens)[rows], tags)


def _heavy_tail(n: int, rate: float, random: Streams, path: _Source) -> Workload:
    """Lognormal outputs of mean 338 and CV^2 2.0: a tail that MLFQ needs to win."""
    del path
    return _jobs(
        arrivals.poisson(n, rate, random.arrivals),
        CHAT_PROMPTS(random.prompts.random(n)),
        lengths.lognormal(median=180, sigma=1.14, cap=4096)(random.outputs.random(n)),
    )


def _azure(name: str) -> _Make:
    def make(n: int, rate: float, random: Streams, path: _Source) -> Workload:
        """The trace's pairs of lengths, drawn with replacement, at Poisson times."""
        times = arrivals.poisson(n, rate, random.arrivals)
        u = random.prompts.random(n)
        if path is None:
            outputs = TWINS[name].outputs(random.outputs.random(n))
            return _jobs(times, TWINS[name].inputs(u), outputs)
        trace = traces.read_azure(path)
        rows = [trace[row] for row in np.floor(u * len(trace)).astype(int)]
        return with_arrivals(tuple(rows), times)

    return make


def _shared_prefixes(n: int, rate: float, random: Streams, path: _Source) -> Workload:
    """Mooncake's synthetic trace in its order, at Poisson times.

    The twin's two numbers are fitted to the trace, at n = 4000: an infinite cache finds
    64 % of its blocks, and an LRU of 10,000 blocks finds 42 %.
    """
    times = arrivals.poisson(n, rate, random.arrivals)
    if path is not None:
        trace = _first(n, traces.read_mooncake(path), path)
        return with_arrivals(trace, times)
    twin = TWINS["mooncake_synth"]
    prompts = sessions.documents(
        n, twin.inputs, random, mean_questions=3.8, mean_gap=500.0
    )
    outputs = twin.outputs(random.outputs.random(n)).tolist()
    rows = zip(times.tolist(), prompts, outputs, strict=True)
    return tuple(Job(t, p.tokens, o, chain=p.chain) for t, p, o in rows)


def _two_clients(n: int, rate: float, random: Streams, path: _Source) -> Workload:
    """One client sends twice as often as the other (VTC's overload experiment)."""
    del path
    clients = (("one", rate / 3), ("two", rate * 2 / 3))
    jobs = [
        Job(time, 256, 256, user=user)
        for user, rps in clients
        for time in arrivals.even(n, rps, random.arrivals).tolist()
    ]
    return tuple(sorted(jobs, key=lambda job: job.arrival_s)[:n])


def _arena(n: int, rate: float, random: Streams, path: _Source) -> Workload:
    """VTC's Arena trace with its own bursts; its time is stretched to the rate."""
    if path is not None:
        trace = traces.read_vtc_arena(path)
        own = np.array([job.arrival_s for job in _first(n, trace, path)])
        own_rps = len(trace) / trace[-1].arrival_s
        times = arrivals.scale(own, rate / own_rps)
        return with_arrivals(trace[:n], times)
    twin = TWINS["vtc_arena"]
    times = twin.arrivals(n, rate, random.arrivals)
    shares = np.cumsum(ARENA_CLIENTS) / sum(ARENA_CLIENTS)
    users = np.searchsorted(shares, random.structure.random(n), side="right").tolist()
    jobs = _jobs(
        times,
        twin.inputs(random.prompts.random(n)),
        twin.outputs(random.outputs.random(n)),
    )
    return tuple(
        job._replace(user=str(user)) for job, user in zip(jobs, users, strict=True)
    )


def _first(n: int, trace: Workload, path: pathlib.Path) -> Workload:
    if n > len(trace):
        raise ValueError(
            f"n={n} must be <= {len(trace)}, the requests in {path}; ask for fewer"
        )
    return trace[:n]


WORKLOADS: dict[str, Spec] = {
    "W1": Spec(_chat, np.inf, "lmsys_proxy_pred_first60k.csv"),
    "W2": Spec(_chat, None, "lmsys_proxy_pred_first60k.csv"),
    "W3": Spec(_heavy_tail),
    "W4-conv": Spec(
        _azure("azure23_conv"),
        TWINS["azure23_conv"].rate_rps,
        "azure_llm_2023_conv.csv",
    ),
    "W4-code": Spec(
        _azure("azure23_code"),
        TWINS["azure23_code"].rate_rps,
        "azure_llm_2023_code.csv",
    ),
    "W6": Spec(
        _shared_prefixes,
        TWINS["mooncake_synth"].rate_rps,
        "mooncake_fast25_synthetic.jsonl",
    ),
    "W7a": Spec(_two_clients, 4.5),  # 90 and 180 requests per minute
    "W7b": Spec(_arena, TWINS["vtc_arena"].rate_rps, "vtc_arena_27clients_10min.csv"),
}


def make_workload(
    name: str,
    *,
    n: int,
    seed: int,
    rate: float | None = None,
    data_dir: str | os.PathLike[str] | None = None,
) -> Workload:
    """n requests of a named workload.

    The same seed gives the same requests at any rate, at times that scale with it.

    Args:
      name: a key of WORKLOADS.
      rate: requests per second, all users together; None: the workload's own.
      data_dir: a folder that may hold the trace; see `trace_path`.

    Raises:
      ValueError: an unknown name, a rate where the workload has none or none where it
        needs one, or more requests than a trace played in order has.
    """
    path = trace_path(name, data_dir)
    spec = WORKLOADS[name]
    checks.count("n", n, 1, "ask for at least one request")
    if spec.rate_rps == np.inf:
        if rate is not None:
            raise ValueError(
                f"rate={rate!r} must be None, for {name} starts with all its requests; "
                "leave it out"
            )
        return spec.make(n, np.inf, streams(seed), path)
    rate = spec.rate_rps if rate is None else rate
    remedy = "give requests per second"
    if spec.rate_rps is None:
        remedy += f", for {name} has no rate of its own"
    return spec.make(n, checks.above("rate", rate, 1e-9, remedy), streams(seed), path)


def trace_path(
    name: str, data_dir: str | os.PathLike[str] | None
) -> pathlib.Path | None:
    """The trace that `make_workload` would read; None: it would draw from a twin.

    Raises:
      ValueError: an unknown name, or a data_dir that is no folder.
    """
    if not isinstance(name, str) or name not in WORKLOADS:
        raise ValueError(f"workload {name!r} must be one of {list(WORKLOADS)}")
    file = WORKLOADS[name].file
    if data_dir is None:
        return None
    if not (folder := pathlib.Path(data_dir)).is_dir():
        raise ValueError(
            f"data_dir={data_dir!r} must be a folder; leave it out to use twins of the "
            "traces"
        )
    return folder / file if file and (folder / file).is_file() else None
