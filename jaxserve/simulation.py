"""Workloads served in logical time: the engine and its scheduler, without a model.

Owns how a workload becomes requests and known outputs. Never computes a token: outputs
are the lengths that the workload says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxserve.config import EngineConfig, EngineShape
from jaxserve.core import Event
from jaxserve.engine import Engine
from jaxserve.executors.cost_model import StepCost
from jaxserve.executors.link import INSTANT, LinkCost
from jaxserve.executors.sim_executor import SimExecutor, Truth
from jaxserve.metrics import RequestMetrics
from jaxserve.models.base import Batch, Pages, Params
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.policies.base import Policy
from jaxserve.workloads import Workload, token_ids

VOCAB_SIZE = 2**30


@dataclasses.dataclass(frozen=True)
class NoModel:
    """Stands where an engine wants a model; a simulation never runs it."""

    vocab_size: int = VOCAB_SIZE
    eos_ids: tuple[int, ...] = ()

    def page_shapes(self, num_blocks: int, block_size: int) -> dict:
        """Refuses: without a model nobody knows the size of a block."""
        raise ValueError(
            "num_blocks=None must be a number in a simulation, which has no model to "
            "size the cache by; set EngineConfig.num_blocks"
        )

    def forward(self, params: Params, pages: Pages, batch: Batch):
        """Never called."""
        raise NotImplementedError

    def logits(self, params: Params, hidden: Any, index: Any, used: Any):
        """Never called."""
        raise NotImplementedError


class Results(NamedTuple):
    """What a run came to.

    Attributes:
      requests: metrics of each job, in the workload's order.
      stats: `Engine.stats` at the end.
    """

    requests: list[RequestMetrics]
    stats: dict[str, int | float]


def simulate(
    workload: Workload,
    config: EngineConfig,
    policy: Policy,
    cost: StepCost,
    *,
    link: LinkCost = INSTANT,
    disk: LinkCost = INSTANT,
    seed: int = 0,
    jump: bool = True,
    on_event: Callable[[Event], None] | None = None,
    progress: Callable[[int], object] | None = None,
) -> Results:
    """Serve a workload to its end in logical time.

    Args:
      workload: jobs; each stops by itself after its output_tokens, within max_model_len
        and the memory there is. None says how many it asks for at most, which would
        tell the policy.
      config: num_blocks must be set. Without prefix caching a run is much faster, for
        launches that change nothing are jumped over.
      cost: seconds of a step. link: of copying KV blocks to the host and back. disk: of
        writing them to disk and reading them.
      seed: of the token ids, which only prefix caching looks at.
      jump: False plans every launch; the result is the same.
      progress: called with the number of requests that ended since the last call.

    Raises:
      ValueError: a job's prompt does not fit the configuration; nothing has run.
    """
    engine = simulated_engine(
        workload,
        config,
        policy,
        cost,
        link=link,
        disk=disk,
        seed=seed,
        jump=jump,
        on_event=on_event,
    )
    return drain(engine, progress)


def simulated_engine(
    workload: Workload,
    config: EngineConfig,
    policy: Policy,
    cost: StepCost,
    *,
    link: LinkCost = INSTANT,
    disk: LinkCost = INSTANT,
    seed: int = 0,
    jump: bool = True,
    on_event: Callable[[Event], None] | None = None,
) -> Engine:
    """An engine in logical time to which a workload has been submitted, not run yet.

    Its requests are "0", "1", ... It may resume a snapshot of another of the same
    workload. Arguments and errors are those of `simulate`.
    """
    truth: dict[int, Truth] = {}

    def executor(model: object, params: object, shape: EngineShape) -> SimExecutor:
        return SimExecutor(shape, truth, cost, link=link, disk=disk, jump=jump)

    model = NoModel()
    engine = Engine(model, None, config, policy, executor=executor, on_event=on_event)
    tokens = token_ids(workload, vocab_size=VOCAB_SIZE, seed=seed)
    for i, (job, (prompt, output)) in enumerate(zip(workload, tokens, strict=True)):
        truth[i] = Truth(output.tolist(), stops=True)
        engine.add_request(
            str(i),
            prompt,
            SamplingParams(max_tokens=None, output_kind="final_only"),
            arrival_time=job.arrival_s,
            priority=job.priority,
            user=job.user,
            deadline_s=job.deadline_s,
            tags=job.tags,
        )
    return engine


def drain(engine: Engine, progress: Callable[[int], object] | None = None) -> Results:
    """Run an engine until all of its requests, "0", "1", ..., have ended.

    Args:
      progress: called with the number of requests that ended since the last call.
    """
    requests = ended(engine, progress)
    return Results([requests[i] for i in sorted(requests)], engine.stats())


def ended(
    engine: Engine, progress: Callable[[int], object] | None = None
) -> dict[int, RequestMetrics]:
    """As `drain`, but only the metrics, by the number of the request."""
    requests: dict[int, RequestMetrics] = {}
    while engine.has_unfinished_requests():
        done = [output for output in engine.step() if output.finished]
        requests |= {int(output.request_id): output.metrics for output in done}
        if progress and done:
            progress(len(done))
    return requests
