"""Workloads served by SmolLM2 in real time: what `simulate` is, with a model.

Owns how a workload becomes requests of a real engine, and that a policy does not see
how long their outputs will be. Outputs have the lengths that the
workload says: the end-of-sequence token is ignored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, cast

from jaxserve import Engine, EngineConfig, SamplingParams
from jaxserve.core import Event
from jaxserve.executors.jax_executor import JaxExecutor
from jaxserve.llm import runs_bfloat16
from jaxserve.models import load, smollm2_path
from jaxserve.models.base import Model, Params
from jaxserve.scheduling.policies import Policy, View, unlimited, unmoved
from jaxserve.simulation import Results, drain
from jaxserve.workloads import Workload, token_ids


class Loaded(NamedTuple):
    """A model and its weights."""

    model: Model
    params: Params


@functools.cache
def smollm2() -> Loaded:
    """SmolLM2-135M in the faster dtype."""
    dtype = "bfloat16" if runs_bfloat16() else "float32"
    return Loaded(*load(smollm2_path(), dtype)[:2])


def blind(policy: Policy, max_model_len: int) -> Policy:
    """The policy, which sees as max_output_tokens what the model's length leaves.

    A run ends each output at its true length by max_tokens, which would tell it.
    """

    def seen(view: View) -> View:
        return view._replace(max_output_tokens=max_model_len - view.prompt_tokens)

    blinded = policy._replace(
        rank=lambda state, view, now_s: policy.rank(state, seen(view), now_s),
        until=lambda state, view, now_s: policy.until(state, seen(view), now_s),
    )
    # The scheduler knows these two by identity, and leaves them out.
    if policy.update is not unmoved:
        blinded = blinded._replace(
            update=lambda state, events, view_of: policy.update(
                state, events, lambda index: seen(view_of(index))
            )
        )
    if policy.allow is not unlimited:
        blinded = blinded._replace(
            allow=lambda state, view: policy.allow(state, seen(view))
        )
    return blinded


def serve(
    loaded: Loaded,
    workload: Workload,
    config: EngineConfig,
    policy: Policy,
    *,
    on_event: Callable[[Event], None] | None = None,
    progress: Callable[[int], object] | None = None,
) -> Results:
    """Serve a workload to its end in real time, from its first second on.

    Args:
      progress: called with the number of requests that ended since the last call.
    """
    return drain(begin(loaded, workload, config, policy, on_event), progress)


def begin(
    loaded: Loaded,
    workload: Workload,
    config: EngineConfig,
    policy: Policy,
    on_event: Callable[[Event], None] | None = None,
) -> Engine:
    """An engine in real time to which a workload has been submitted, not run yet.

    Programs are compiled, where they are not yet, before the clock starts.
    """
    policy = blind(policy, config.max_model_len)
    engine = Engine(*loaded, config, policy, on_event=on_event)
    executor = cast(JaxExecutor, engine.executor)
    executor.warmup(lambda shapes: shapes, transfers=engine.swaps)
    tokens = token_ids(workload, vocab_size=loaded.model.vocab_size, seed=0)
    start_s = engine.now()
    for i, (job, (prompt, output)) in enumerate(zip(workload, tokens, strict=True)):
        engine.add_request(
            str(i),
            prompt,
            SamplingParams(
                temperature=0.0,
                max_tokens=len(output),
                ignore_eos=True,
                output_kind="final_only",
            ),
            arrival_time=start_s + job.arrival_s,
            priority=job.priority,
            user=job.user,
            deadline_s=None if job.deadline_s is None else start_s + job.deadline_s,
            tags=job.tags,
        )
    return engine
