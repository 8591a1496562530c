"""An engine whose every step takes one second, so that schedules can be worked out by
hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxserve import EngineConfig
from jaxserve.core import Event
from jaxserve.executors.cost_model import LinearCost
from jaxserve.executors.sim_executor import Truth
from jaxserve.scheduling.policies import Policy
from tests.engine.harness import Served, sim_executor

ONE_SLOT = EngineConfig(
    max_model_len=64,
    max_num_seqs=1,
    max_num_batched_tokens=64,
    block_size=4,
    num_blocks=64,
    enable_prefix_caching=False,
    max_logprobs=0,
)


class Job(NamedTuple):
    """A request by what matters to a schedule. A context of any length is computed in
    the step that samples the next token, so n output tokens take n seconds. It stops by
    itself: its max_tokens is what the model's length leaves."""

    output_tokens: int
    arrival_s: float = 0.0
    prompt_tokens: int = 1
    user: str | None = None


def serve(
    policy: Policy,
    jobs: Mapping[str, Job],
    cost: LinearCost | None = None,
    **fields: Any,
) -> Served:
    """Serve the jobs to the end; fields replace those of ONE_SLOT."""
    truth = {
        i: Truth([1] * job.output_tokens, True) for i, job in enumerate(jobs.values())
    }
    cost = cost or LinearCost(fixed_s=1.0, token_s=0.0)
    served = Served(
        dataclasses.replace(ONE_SLOT, **fields),
        policy=policy,
        executor=sim_executor(truth, cost),
    )
    for name, job in jobs.items():
        served.add(
            name,
            [2] * job.prompt_tokens,
            None,
            arrival_time=job.arrival_s,
            user=job.user,
        )
    served.finish()
    return served


def lengths(jobs: Mapping[str, Job]) -> dict[int, int]:
    """What an oracle has to know."""
    return {i: job.output_tokens for i, job in enumerate(jobs.values())}


def ends_s(served: Served) -> dict[str, float]:
    """When each request got its last token."""
    found = {name: o.metrics.finished_s for name, o in served.outputs.items()}
    return {name: at for name, at in found.items() if at is not None}


def displaced(served: Served) -> list[tuple[str | None, float]]:
    """Who lost a slot, and when."""
    return [(e.request_id, e.time_s) for e in served.of("preempted")]


def arrivals(jobs: Mapping[str, Job]) -> Sequence[Event]:
    """The events that tell a policy of them."""
    return [
        Event(
            "arrived",
            job.arrival_s,
            name,
            {"index": i, "prompt_tokens": job.prompt_tokens, "user": job.user},
        )
        for i, (name, job) in enumerate(jobs.items())
    ]


class Watch:
    """Keeps a policy's latest state."""

    def __init__(self, policy: Policy):
        self.state = policy.init()

        def update(state, events, view_of):
            self.state, stale = policy.update(state, events, view_of)
            return self.state, stale

        self.policy = policy._replace(update=update)
