"""The loop of an engine: plan, submit, observe.

Owns the launches in flight, and whether the engine is whole. Never sees a request's
output or a caller.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

from jaxserve.clients import Clients
from jaxserve.config import EngineConfig, EngineShape
from jaxserve.core import StepOutput
from jaxserve.executors.base import Executor, Simulation, Ticket
from jaxserve.leaps import tell_leap
from jaxserve.reports import Reports
from jaxserve.scheduling.running import Launch
from jaxserve.scheduling.scheduler import Scheduler


class _Flight(NamedTuple):
    launch: Launch
    ticket: Ticket
    number: int
    submitted_s: float
    host_s: float  # time it took to plan


class Loop:
    """Runs the launches of one engine.

    Args:
      executor: runs them. clients: whose they are; its scheduler plans them.
      jumps: launches may be run in a simulation without planning each: no text can end
        an output.

    Attributes:
      broken: why it cannot go on; None while it can.
      last_read_s: when the last launch that was read had ended.
    """

    def __init__(
        self,
        executor: Executor,
        clients: Clients,
        reports: Reports,
        config: EngineConfig,
        shape: EngineShape,
        *,
        jumps: bool,
    ):
        self._executor = executor
        self._clients = clients
        self._reports = reports
        self._shape = shape
        self._depth = config.launches_in_flight
        # That needs plans that wait for every output, too.
        jumps = jumps and self._depth == 1 and getattr(executor, "jumps", False)
        self._simulation = cast(Simulation, executor) if jumps else None
        self._flights: deque[_Flight] = deque()
        self._planned: tuple[Launch, float] | None = None  # not submitted yet
        self.last_read_s = 0.0
        self.broken: str | None = None

    @property
    def _scheduler(self) -> Scheduler:
        return self._clients.scheduler

    @property
    def in_flight(self) -> bool:
        """Whether a launch is not read, or not submitted yet."""
        return bool(self._flights or self._planned)

    @contextlib.contextmanager
    def or_break(self, kinds: type[BaseException] = BaseException) -> Iterator[None]:
        """After an error here plans and device no longer agree: refuse to go on."""
        try:
            yield
        except kinds as error:
            self.broken = f"the engine has stopped: {error!r}"
            if not isinstance(error, Exception):
                raise
            raise RuntimeError(self.broken) from error

    def check(self) -> None:
        """Refuse to go on if the engine is not whole."""
        if self.broken:
            raise RuntimeError(self.broken)

    def turn(self) -> None:
        """Plan and submit one launch, and read the oldest once enough are in flight."""
        if len(self._flights) >= self._depth:  # an interrupt kept one from being read
            self._read()
            return
        if self._planned is None and self._leap():
            return
        if self._planned is None:
            self._plan()
        launch = self._submit()
        if self._flights and (launch is None or len(self._flights) >= self._depth):
            self._read()
        elif launch is None and self._scheduler.has_requests:
            with self.or_break(Exception):
                due_s = self._scheduler.waits_until_s
                if due_s is None:
                    raise RuntimeError("no launch can be planned, but requests wait")
                until_s = min(self._clients.next_arrival_s, due_s)
                self._executor.await_arrival(until_s)

    def drain(self) -> None:
        """Read every launch, those that were planned included."""
        self._submit()
        while self._flights:
            self._read()
        self._reports.deliver()

    def tidy(self) -> None:
        """If nobody is left, read and give back everything."""
        while not self._scheduler.has_requests and (
            self._flights or self._scheduler.has_chores
        ):
            self.turn()
            self._reports.deliver()
        self._reports.deliver()

    def run_down(self, done: Callable[[], bool]) -> None:
        """Go on without taking anybody in, until it is done."""
        scheduler = self._scheduler
        scheduler.admits = False
        try:
            while not done():
                self._plan()
                if self._planned is None:
                    with self.or_break():
                        raise RuntimeError("requests hold slots, but none can go on")
                self.drain()
        finally:
            scheduler.admits = True

    def _plan(self) -> None:
        with self.or_break():
            self._clients.arrive()
            self._scheduler.arrived(self._executor.arrived())
            start = time.perf_counter()
            launch = self._scheduler.plan(self._executor.now())
            self._clients.publish()
            host_s = time.perf_counter() - start
            self._planned = (launch, host_s) if launch else None

    def _submit(self) -> Launch | None:
        """Hand the launch that was planned to the executor, if there is one."""
        if self._planned is None:
            return None
        launch, host_s = self._planned
        submitted_s = self._executor.now()
        with self.or_break(Exception):  # an interrupt: submitted again
            ticket = self._executor.submit(launch.plan, launch.who, launch.moves)
        number = self._reports.accounts.launches
        self._reports.accounts.launches += 1
        flight = _Flight(launch, ticket, number, submitted_s, host_s)
        self._flights.append(flight)
        self._planned = None
        return launch

    def _read(self) -> None:
        flight = self._flights[0]
        with self.or_break(Exception):  # an interrupt: read again
            output = self._executor.result(flight.ticket)
        with self.or_break():
            self._flights.popleft()
            began_s = max(flight.submitted_s, self.last_read_s)
            self.last_read_s = now_s = self._executor.now()
            start = time.perf_counter()
            observed = self._scheduler.observe(flight.launch, output)
            span_s, timed = now_s - began_s, self._executor.timed()
            self._scheduler.measure(flight.launch, output, span_s, timed, now_s)
            self._clients.publish()
            for seen in observed:
                self._clients.absorb(seen, span_s)
            self._clients.answer_held()
            host_s = flight.host_s + time.perf_counter() - start
            self._record(flight, output, host_s)

    def _record(self, flight: _Flight, output: StepOutput, host_s: float) -> None:
        work = self._reports.accounts.record(flight.launch, output, host_s)
        self._reports.add_launch(
            self._executor.now(),
            work,
            self._executor.compiles,
            launch=flight.number,
            num_free=output.num_free,
            live_handles=self._scheduler.cached_blocks,
            idle_handles=self._scheduler.idle_cached_blocks,
            waiting=self._scheduler.num_waiting,
            running=self._scheduler.num_running,
            host_s=host_s,
            submitted_s=flight.submitted_s,
        )

    def _leap(self) -> bool:
        """In a simulation, run the launches that need no planning; False if none."""
        if self._simulation is None or self._flights:
            return False
        start = time.perf_counter()
        self._clients.arrive()
        with self.or_break():
            began_s = self._executor.now()
            rows, launches, until_s = self._scheduler.horizon(began_s)
            if launches == 0:
                return False
            until_s = min(until_s, self._clients.next_arrival_s)
            who = [(r.running.slot, r.running.request.index, r.steps > 0) for r in rows]
            done = self._simulation.leap(who, launches, until_s)
            if not done.ends_s:
                return False
            self._scheduler.leap(rows, done.tokens)
            self.last_read_s = done.ends_s[-1]
            tell_leap(
                self._scheduler,
                self._reports,
                self._shape,
                rows,
                self._clients.by_index,
                [began_s, *done.ends_s],
                (time.perf_counter() - start) / len(done.ends_s),
                lambda: self._clients.conclude(rows, done),
            )
        return True
