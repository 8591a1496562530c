"""Runs plans on a JAX device: one jitted launch, state donated, results read late.

Owns the device state and the compiled programs. Never sees a request or the scheduler.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax

from jaxserve.config import EngineShape
from jaxserve.core import StepOutput, StepPlan, empty_plan, pack
from jaxserve.device import state as device_state
from jaxserve.device.step import Outputs, compiled, num_compiled
from jaxserve.executors.cost_model import LogicalClock, StepCost
from jaxserve.models.base import Model, Params


class _Ticket(NamedTuple):
    outputs: Outputs  # on the device
    plan: StepPlan
    submitted_s: float


class JaxExecutor:
    """An executor on JAX's default device.

    Args:
      model: a frozen model; params: its weights, taken as they are.
      shape: static sizes.
      cost: None keeps the wall clock; a cost model keeps a `LogicalClock` instead.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        shape: EngineShape,
        *,
        cost: StepCost | None = None,
    ):
        self._shape = shape
        self._params = params
        self._clock = LogicalClock(shape, cost) if cost else None
        self._start_s = time.perf_counter()
        self._process = os.getpid()
        self._step = compiled(model, shape)
        self._compiled_before = num_compiled(self._step)
        self._state = device_state.init(model, shape)

    def now(self) -> float:
        """Seconds since the executor was made, or logical time."""
        if self._clock:
            return self._clock.now()
        return time.perf_counter() - self._start_s

    def sleep_until(self, t_s: float) -> None:
        """Wait until `now` is t_s."""
        if self._clock:
            self._clock.sleep_until(t_s)
        else:
            while (left_s := t_s - self.now()) > 0:
                time.sleep(min(left_s, 60.0))  # the system's sleep has a limit

    @property
    def compiles(self) -> int:
        """Programs compiled since this executor was made."""
        return num_compiled(self._step) - self._compiled_before

    @property
    def state(self) -> device_state.EngineState:
        """The device state after every launch submitted; donated by the next one."""
        return self._state

    def submit(self, plan: StepPlan, who: Sequence[int]) -> _Ticket:
        """Dispatch the launch; returns before it has run."""
        del who  # the device knows its rows by slot
        if os.getpid() != self._process:
            raise RuntimeError(
                f"the engine was made in process {self._process} and is used in "
                f"{os.getpid()}, a fork of it, where JAX's threads do not exist; make "
                "the engine in the child, or start it with multiprocessing's 'spawn'"
            )
        self._state, outputs = self._step(
            self._params, self._state, pack(plan), rows=plan.rows, tokens=plan.tokens
        )
        return _Ticket(outputs, plan, self.now())

    def result(self, ticket: _Ticket) -> StepOutput:
        """Wait for the launch and bring its outputs to the host in one transfer."""
        out = jax.device_get(ticket.outputs)
        if self._clock:
            self._clock.finish(ticket.plan, out.ran, ticket.submitted_s)
        return StepOutput(
            tokens=out.tokens,
            ran=out.ran,
            done=out.done,
            num_free=int(out.num_free),
            logprobs=out.logprobs,
            ranks=out.ranks,
            top_ids=out.top_ids,
            top_logprobs=out.top_logprobs,
        )

    def warmup(
        self, progress: Callable[[Iterable[tuple[int, int]]], Iterable[tuple[int, int]]]
    ) -> None:
        """Compile every launch shape by running a plan that does nothing in each.

        Args:
          progress: wraps the iterable of shapes, for a progress bar.
        """
        for rows, tokens in progress(self._shape.launch_shapes()):
            plan = pack(empty_plan(self._shape, rows, tokens))
            self._state, outputs = self._step(
                self._params, self._state, plan, rows=rows, tokens=tokens
            )
            jax.block_until_ready(outputs)
