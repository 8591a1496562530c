"""The loop: add, plan, submit, observe.

Owns requests from submission to their last output, and the launches in flight. Never
sees a device array or a physical block. Token ids in, token ids out; a tokenizer only
adds text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from jaxserve import validation
from jaxserve.config import EngineConfig, EngineShape, SamplingParams
from jaxserve.core import Event, Request, StepOutput
from jaxserve.executors.base import Executor, Leap, Simulation, Ticket
from jaxserve.leaps import tell_leap
from jaxserve.live import Live
from jaxserve.models.base import (
    Model,
    Params,
    num_blocks,
    num_disk_blocks,
    num_swap_blocks,
)
from jaxserve.models.detokenizer import Decodes
from jaxserve.outputs import RequestOutput
from jaxserve.reports import Reports
from jaxserve.scheduling.policies import Policy, check_is_policy, fcfs
from jaxserve.scheduling.running import Launch, Row, Running, progressed
from jaxserve.scheduling.scheduler import Observed, Scheduler
from pallas_kernels.packed import skip_padding

MakeExecutor = Callable[[Model, Params, EngineShape], Executor]


class _Flight(NamedTuple):
    launch: Launch
    ticket: Ticket
    number: int
    submitted_s: float
    host_s: float  # time it took to plan


class Engine:
    """Serves requests with one model on one executor. Not thread-safe.

    Args:
      model: implements `models.base.Model`; frozen and hashable.
      params: its weights, a pytree; an argument of every launch, never copied.
      config: sizes and switches.
      policy: orders requests; default first come, first served.
      tokenizer: adds text and stop strings to the outputs.
      executor: makes what runs the plans; default JAX's default device.
      on_event: called with every `core.Event`, in order, once the engine is whole
        again: it may submit and abort requests.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        config: EngineConfig | None = None,
        policy: Policy | None = None,
        tokenizer: Decodes | None = None,
        *,
        executor: MakeExecutor | None = None,
        on_event: Callable[[Event], None] | None = None,
    ):
        self.config = config or EngineConfig()
        blocks = num_blocks(model, self.config)
        self.shape = self.config.shape(
            blocks, len(model.eos_ids), padding_is_free=skip_padding(params)
        )
        if policy is not None:
            check_is_policy("policy", policy)
        self.model, self.params = model, params
        self._tokenizer = tokenizer
        self.executor = (executor or _jax_executor(self.config))(
            model, params, self.shape
        )
        self._simulation = self._jumping(self.executor)
        swap_blocks = num_swap_blocks(model, self.config)
        disk_blocks = num_disk_blocks(model, self.config)
        self.swaps = swap_blocks + disk_blocks > 0
        self._scheduler = Scheduler(
            self.config,
            self.shape,
            policy or fcfs(),
            swap_blocks,
            disk_blocks,
            self.executor.stored(),
        )
        self._flights: deque[_Flight] = deque()
        self._future: list[tuple[float, int, Live]] = []  # heap by arrival
        self._live: dict[str, Live] = {}  # by request id
        self._by_index: dict[int, Live] = {}
        self._outputs: list[RequestOutput] = []  # to be returned by the next step
        self._planned: tuple[Launch, float] | None = None  # not submitted yet
        self._held: dict[int, tuple[Live, str, float]] = {}  # complete, not answered
        self._submitted = 0
        self._last_read_s = 0.0
        self._broken: str | None = None
        self._reports = Reports(on_event)

    # Requests -------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | np.ndarray,
        sampling_params: SamplingParams | None = None,
        arrival_time: float | None = None,
        priority: int = 0,
        user: str | None = None,
        deadline_s: float | None = None,
        tags: Mapping[str, str] | None = None,
        cache_salt: str | None = None,
        *,
        prompt: str | None = None,
    ) -> None:
        """Submit a request; it is served by later calls of `step`.

        Args:
          request_id: unique among the requests that have not ended.
          prompt_token_ids: at least one token id.
          sampling_params: default `SamplingParams()`.
          arrival_time: seconds on the engine's clock (`now`); a future one keeps the
            request out of sight until then. None = now.
          priority: lower goes first, under policies that look at it.
          user, tags: whom and what it is for, under policies that look at them.
          deadline_s: when its last token should be there, on the engine's clock.
          cache_salt: only requests of the same salt share cached blocks.
          prompt: its text, returned with the output; policies may read it.

        Raises:
          ValueError: the request cannot be served; nothing has changed.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(request_id, str) or not request_id:
            raise ValueError(f"request_id={request_id!r} must be a non-empty string")
        if request_id in self._live:
            raise ValueError(
                f"request_id={request_id!r} is in use by a request that has not ended; "
                "choose another id, or abort that one first"
            )
        vocab, config, shape = self.model.vocab_size, self.config, self.shape
        ids = validation.check_prompt(prompt_token_ids, vocab, config, shape)
        has_text = self._tokenizer is not None
        validation.check_params(params, vocab, config, has_text=has_text)
        validation.check_terms(
            arrival_time=arrival_time,
            priority=priority,
            user=user,
            deadline_s=deadline_s,
            tags=tags,
            cache_salt=cache_salt,
        )
        request = Request(
            request_id,
            self._submitted,
            ids,
            params,
            max_output_tokens=validation.output_limit(len(ids), params, config, shape),
            stop_ids=validation.stop_ids(params, self.model.eos_ids, shape),
            arrival_s=self.now() if arrival_time is None else float(arrival_time),
            priority=int(priority),
            user=user,
            deadline_s=deadline_s,
            tags=tags,
            cache_salt=cache_salt,
            text=prompt,
        )
        live = Live(request, self._tokenizer, prompt)
        self._submitted += 1
        self._live[request_id] = live
        self._by_index[request.index] = live
        heapq.heappush(self._future, (request.arrival_s, request.index, live))

    def abort_request(self, request_id: str) -> bool:
        """End a request now; False if no live request has this id.

        Its slot and blocks are given back by the next launch, tokens still in flight
        are dropped, and the id may be used again at once. The next `step` returns its
        output with finish_reason "abort".
        """
        live = self._live.get(request_id)
        if live is None:
            return False
        waits = [entry for entry in self._future if entry[2] is not live]
        arrived = len(waits) == len(self._future)
        if not arrived:
            self._future = waits
            heapq.heapify(self._future)
        running = self._scheduler.resident(live.request)
        if running and self._scheduler.holds_answers:
            self._tell_progress(live, running, 0, len(live.request.output))
        self._finish(live, "abort", arrived=arrived)
        self._outputs.append(live.output())
        self._outputs += [self._answer(r) for r in self._scheduler.answered()]
        self._reports.deliver()
        return True

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to return."""
        return bool(self._live or self._outputs)

    def now(self) -> float:
        """Seconds on the engine's clock."""
        return self.executor.now()

    # The loop -------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Plan and submit one launch, and read the oldest once enough are in flight.

        Returns the requests that got tokens or ended, with all of their output so far.
        """
        if self._broken:
            raise RuntimeError(self._broken)
        self._turn()
        self._reports.deliver()
        while not self._scheduler.has_requests and (
            self._flights or self._scheduler.has_chores
        ):
            self._turn()  # nobody is left: read and give back everything
            self._reports.deliver()
        if not self._scheduler.has_requests:
            self._scheduler.settle(self.now())
        if not self._outputs and self._future and not self._scheduler.has_requests:
            self.executor.sleep_until(self._future[0][0])
        outputs, self._outputs = self._outputs, []
        return outputs

    def _arrive(self) -> None:
        now_s = self.now()
        while self._future and self._future[0][0] <= now_s:
            arrival_s, _, live = heapq.heappop(self._future)
            self._scheduler.add(live.request)
            prompt = len(live.request.prompt)
            self._tell(
                live,
                "arrived",
                arrival_s=arrival_s,
                prompt_tokens=prompt,
                priority=live.request.priority,
                user=live.request.user,
                deadline_s=live.request.deadline_s,
            )

    def _turn(self) -> None:
        depth = self.config.launches_in_flight
        if len(self._flights) >= depth:  # an interrupt kept one from being read
            self._read()
            return
        if self._planned is None and self._leap():
            return
        if self._planned is None:
            with self._or_break(BaseException):
                self._planned = self._plan()
        if self._planned is not None:
            launch, host_s = self._planned
            submitted_s = self.now()
            with self._or_break(Exception):  # an interrupt: submitted again
                ticket = self.executor.submit(launch.plan, launch.who, launch.moves)
            number = self._reports.accounts.launches
            self._reports.accounts.launches += 1
            flight = _Flight(launch, ticket, number, submitted_s, host_s)
            self._flights.append(flight)
        launch, self._planned = self._planned, None
        if self._flights and (launch is None or len(self._flights) >= depth):
            self._read()
        elif launch is None and self._scheduler.has_requests:
            with self._or_break(Exception):
                due_s = self._scheduler.waits_until_s
                if due_s is None:
                    raise RuntimeError("no launch can be planned, but requests wait")
                next_s = self._future[0][0] if self._future else math.inf
                self.executor.await_arrival(min(next_s, due_s))

    def _jumping(self, executor: Executor) -> Simulation | None:
        """The executor, if launches may be run in it without planning each: that needs
        plans that wait for every output, and outputs that no text can end."""
        alone = self.config.launches_in_flight == 1 and self._tokenizer is None
        jumps = alone and getattr(executor, "jumps", False)
        return cast(Simulation, executor) if jumps else None

    def _leap(self) -> bool:
        """In a simulation, run the launches that need no planning; False if none."""
        if self._simulation is None or self._flights:
            return False
        start = time.perf_counter()
        self._arrive()
        with self._or_break(BaseException):
            began_s = self.now()
            rows, launches, until_s = self._scheduler.horizon(began_s)
            if launches == 0:
                return False
            if self._future:
                until_s = min(until_s, self._future[0][0])
            who = [(r.running.slot, r.running.request.index, r.steps > 0) for r in rows]
            done = self._simulation.leap(who, launches, until_s)
            if not done.ends_s:
                return False
            self._scheduler.leap(rows, done.tokens)
            self._last_read_s = done.ends_s[-1]
            tell_leap(
                self._scheduler,
                self._reports,
                self.shape,
                rows,
                self._by_index,
                [began_s, *done.ends_s],
                (time.perf_counter() - start) / len(done.ends_s),
                lambda: self._conclude(rows, done),
            )
        return True

    def _conclude(self, rows: Sequence[Row], done: Leap) -> None:
        """End the requests that the last launch of a leap completed."""
        for row, tokens, stopped in zip(rows, done.tokens, done.done, strict=True):
            if not tokens:
                continue
            request = row.running.request
            live = self._by_index[request.index]
            reason, _ = live.absorb(len(request.output) - len(tokens), stopped)
            streams = request.params.output_kind == "cumulative"
            told = streams and not self._scheduler.holds_answers
            if reason:
                self._outputs += filter(None, [self._end(live, reason, 0.0)])
            elif told:
                self._outputs.append(live.output())
        self._outputs += [self._answer(r) for r in self._scheduler.answered()]

    def _plan(self) -> tuple[Launch, float] | None:
        self._arrive()
        self._scheduler.arrived(self.executor.arrived())
        start = time.perf_counter()
        launch = self._scheduler.plan(self.now())
        self._publish()
        return (launch, time.perf_counter() - start) if launch else None

    def _publish(self) -> None:
        """Tell what the scheduler did with requests."""
        for event in self._scheduler.take_events():
            live = self._by_index.get(event.data["index"])
            if live:
                live.note(event)
            self._reports.add(event)

    def _read(self) -> None:
        flight = self._flights[0]
        with self._or_break(Exception):  # an interrupt: read again
            output = self.executor.result(flight.ticket)
        with self._or_break(BaseException):
            self._flights.popleft()
            began_s = max(flight.submitted_s, self._last_read_s)
            self._last_read_s = self.now()
            start = time.perf_counter()
            observed = self._scheduler.observe(flight.launch, output)
            span_s = self._last_read_s - began_s
            timed = self.executor.timed()
            self._scheduler.measure(
                flight.launch, output, span_s, timed, self._last_read_s
            )
            self._publish()
            results = [self._absorb(seen, span_s) for seen in observed]
            results += [self._answer(r) for r in self._scheduler.answered()]
            host_s = flight.host_s + time.perf_counter() - start
            self._record(flight, output, host_s)
            self._outputs += [result for result in results if result is not None]

    def _absorb(self, seen: Observed, span_s: float) -> RequestOutput | None:
        """Take in a request's new tokens; what its caller is told, if anything.

        Args:
          span_s: how long the launch took.
        """
        running, request = seen.running, seen.running.request
        live = self._by_index[request.index]
        reason, cut = live.absorb(seen.first_output, seen.stopped)
        self._scheduler.counters.dropped_tokens += cut
        new = len(request.output) - seen.first_output
        self._reports.accounts.output_tokens += new
        told = 0 if self._scheduler.holds_answers else new
        self._tell_progress(live, running, seen.prompt_tokens, told)
        if reason:
            late = seen.steps - (seen.sampled - cut)  # steps after the last token kept
            return self._end(live, reason, span_s * late / max(seen.steps, 1))
        streams = told and request.params.output_kind == "cumulative"
        return live.output() if streams else None

    def _end(self, live: Live, reason: str, late_s: float) -> RequestOutput | None:
        """The request's answer is complete; it, unless it waits for its batch."""
        request = live.request
        if self._scheduler.holds_answers:
            self._scheduler.hold(request)
            self._held[request.index] = (live, reason, self.now() - late_s)
            return None
        self._finish(live, reason, late_s=late_s)
        return live.output()

    def _answer(self, running: Running) -> RequestOutput:
        """Give a whole answer that waited for the rest of its static batch."""
        live, reason, complete_s = self._held[running.request.index]
        self._tell_progress(live, running, 0, len(running.request.output))
        self._finish(live, reason, late_s=self.now() - complete_s)
        return live.output()

    def _finish(
        self, live: Live, reason: str, *, arrived: bool = True, late_s: float = 0.0
    ) -> None:
        request = live.request
        self._held.pop(request.index, None)
        request.finish_reason = reason
        live.finish()
        if arrived:
            self._scheduler.end(request)
        del self._live[request.request_id]
        del self._by_index[request.index]
        self._tell(
            live,
            "finished",
            arrived=arrived,
            reason=reason,
            prompt_tokens=len(request.prompt),
            cached_tokens=request.num_cached_tokens or 0,
            output_tokens=len(request.output),
            finish_delay_s=late_s,
        )

    @contextlib.contextmanager
    def _or_break(self, kinds: type[BaseException]) -> Iterator[None]:
        """After an error here plans and device no longer agree: refuse to go on."""
        try:
            yield
        except kinds as error:
            self._broken = f"the engine has stopped: {error!r}"
            if not isinstance(error, Exception):
                raise
            raise RuntimeError(self._broken) from error

    # Reports --------------------------------------------------------------------------

    def _tell(
        self, live: Live, kind: str, *, arrived: bool = True, **data: Any
    ) -> None:
        """Emit an event of a request; the policy hears of those that have arrived."""
        request = live.request
        event = Event(
            kind, self.now(), request.request_id, {"index": request.index, **data}
        )
        if arrived:
            self._scheduler.note(event)
        live.note(event)
        self._reports.add(event)

    def _tell_progress(
        self, live: Live, running: Running, prompt_tokens: int, output_tokens: int
    ) -> None:
        now_s = self.now()
        live.took([now_s] * output_tokens)
        if self._scheduler.listens or self._reports.wanted:
            event = progressed(running, now_s, prompt_tokens, output_tokens)
            self._scheduler.note(event)
            self._reports.add(event)

    def _record(self, flight: _Flight, output: StepOutput, host_s: float) -> None:
        work = self._reports.accounts.record(flight.launch, output, host_s)
        self._reports.add_launch(
            self.now(),
            work,
            self.executor.compiles,
            launch=flight.number,
            num_free=output.num_free,
            live_handles=self._scheduler.cached_blocks,
            idle_handles=self._scheduler.idle_cached_blocks,
            waiting=self._scheduler.num_waiting,
            running=self._scheduler.num_running,
            host_s=host_s,
            submitted_s=flight.submitted_s,
        )

    def stats(self) -> dict[str, int | float]:
        """Counters and gauges. Blocks are counted after every launch planned so far."""
        scheduler = self._scheduler
        return {
            "num_blocks": self.shape.num_blocks,
            "free_blocks": scheduler.free_blocks,
            "cached_blocks": scheduler.cached_blocks,
            "idle_cached_blocks": scheduler.idle_cached_blocks,
            "cache_loss_blocks": scheduler.lost_blocks,
            "fragmentation": scheduler.fragmentation,
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting + len(self._future),
            "compiles": self.executor.compiles,
            **scheduler.below,
            **scheduler.moved(self.executor.block_bytes),
            **dataclasses.asdict(scheduler.counters),
            **dataclasses.asdict(self._reports.accounts),
        }

    def reset_prefix_cache(self) -> None:
        """Forget every cached block in every tier, what is on disk included; running
        requests keep the ones they use.

        What nobody uses is free again by the next launch, or at once when idle.
        """
        self._scheduler.reset_prefix_cache()
        while not self._scheduler.has_requests and self._scheduler.has_chores:
            self._turn()
        self._reports.deliver()

    def settle_tiers(self, *, save: bool = False) -> None:
        """Wait until nothing is on its way between the tiers. No request may be left.

        Args:
          save: write to disk what is cached above it, first.
        """
        if self.has_unfinished_requests():
            raise RuntimeError("requests are left; serve or abort them first")
        if save:
            self._scheduler.save_cached()
        while self._scheduler.has_chores or self._scheduler.saving or self._flights:
            if not (self._scheduler.has_chores or self._flights):
                self.executor.await_arrival(self.now() + 1.0)
            self._turn()
        self._reports.deliver()

    def close(self) -> None:
        """End every request, write to disk what is cached above it, and stop the
        threads. The engine cannot be used afterwards."""
        if self._broken is None:
            for request_id in list(self._live):
                self.abort_request(request_id)
            self._outputs.clear()
            self.settle_tiers(save=True)
        self.executor.close()
        self._broken = "the engine was closed"

    def set_weight_version(self, version: int) -> None:
        """The weights are others from now on: no cached block is found again.

        Running requests go on with what they have, and nobody finds it.
        """
        self._scheduler.set_weight_version(version)
        while not self._scheduler.has_requests and self._scheduler.has_chores:
            self._turn()
        self._reports.deliver()

    def holds_nothing(self) -> bool:
        """Whether no map of the engine or the scheduler has an entry left."""
        mine = self._live or self._by_index or self._flights or self._future
        told = self._outputs or self._held or not self._reports.delivered
        idle = not (mine or told or self._planned)
        return idle and self._scheduler.holds_nothing()


def _jax_executor(config: EngineConfig) -> MakeExecutor:
    def make(model: Model, params: Params, shape: EngineShape) -> Executor:
        from jaxserve.executors.jax_executor import JaxExecutor, open_store

        store = None
        if num_disk_blocks(model, config) and config.disk_cache_dir is not None:
            store = open_store(config.disk_cache_dir, model, params, shape)
        return JaxExecutor(model, params, shape, store=store)

    return make
