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
from jaxserve.executors.link import INSTANT, LinkCost
from jaxserve.executors.transfers import Transfers
from jaxserve.models.base import Model, Params
from jaxserve.moves import STILL, Moves, Transferred


class _Ticket(NamedTuple):
    outputs: Outputs  # on the device
    plan: StepPlan
    moves: Moves
    submitted_s: float


class JaxExecutor:
    """An executor on JAX's default device.

    Args:
      model: a frozen model; params: its weights, taken as they are.
      shape: static sizes.
      cost: None keeps the wall clock; a cost model keeps a `LogicalClock` instead.
      link: of copying blocks to the host and back, on that clock.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        shape: EngineShape,
        *,
        cost: StepCost | None = None,
        link: LinkCost = INSTANT,
    ):
        self._shape = shape
        self._params = params
        self._clock = LogicalClock(shape, cost, link) if cost else None
        self._start_s = time.perf_counter()
        self._process = os.getpid()
        self._step = compiled(model, shape)
        self._compiled_before = num_compiled(self._step)
        self._transfers = Transfers(model, shape)
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
        steps = num_compiled(self._step) - self._compiled_before
        return steps + self._transfers.compiles

    @property
    def state(self) -> device_state.EngineState:
        """The device state after every launch submitted; donated by the next one."""
        return self._state

    @property
    def num_payloads(self) -> int:
        """KV blocks held in host memory."""
        return self._transfers.num_held

    def arrivals(self) -> list[int]:
        """Payloads that were fetched and have arrived since the last call."""
        return (self._clock or self._transfers).arrivals()

    def await_arrival(self, until_s: float) -> None:
        """Wait until the next payload arrives or `now` is until_s."""
        if self._clock:
            self._clock.await_arrival(until_s)
        else:
            self._transfers.await_arrival(until_s - self.now())

    def timed(self) -> list[Transferred]:
        """Transfers that have ended since the last call."""
        timed = self._transfers.timed()  # on a logical clock they do not count
        return self._clock.timed() if self._clock else timed

    def submit(
        self, plan: StepPlan, who: Sequence[int], moves: Moves = STILL
    ) -> _Ticket:
        """Dispatch the launch; returns before it has run."""
        del who  # the device knows its rows by slot
        if os.getpid() != self._process:
            raise RuntimeError(
                f"the engine was made in process {self._process} and is used in "
                f"{os.getpid()}, a fork of it, where JAX's threads do not exist; make "
                "the engine in the child, or start it with multiprocessing's 'spawn'"
            )
        self._transfers.leave(self._state, moves)
        self._state, outputs = self._step(
            self._params, self._state, pack(plan), rows=plan.rows, tokens=plan.tokens
        )
        self._state = self._transfers.settle(self._state, moves)
        if self._clock:
            self._clock.fetch(moves)
        return _Ticket(outputs, plan, moves, self.now())

    def result(self, ticket: _Ticket) -> StepOutput:
        """Wait for the launch and bring its outputs to the host in one transfer."""
        out = jax.device_get(ticket.outputs)
        if self._clock:
            self._clock.finish(ticket.plan, out.ran, ticket.submitted_s, ticket.moves)
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
        self,
        progress: Callable[[Iterable[tuple[int, int]]], Iterable[tuple[int, int]]],
        *,
        transfers: bool = False,
    ) -> None:
        """Compile every launch shape by running a plan that does nothing in each.

        Args:
          progress: wraps the iterable of shapes, for a progress bar.
          transfers: also what copies blocks to the host and back.
        """
        if transfers:
            self._state = self._transfers.warm_up(self._state)
        for rows, tokens in progress(self._shape.launch_shapes()):
            plan = pack(empty_plan(self._shape, rows, tokens))
            self._state, outputs = self._step(
                self._params, self._state, plan, rows=rows, tokens=tokens
            )
            jax.block_until_ready(outputs)
