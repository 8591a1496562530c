"""The requests of an engine, from submission to their last output.

Owns who they are, what their callers are told, and their events. Never sees a launch in
flight or an executor.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxserve.answers import Answer
from jaxserve.core import Event
from jaxserve.executors.base import Leap
from jaxserve.live import Live
from jaxserve.outputs import RequestOutput
from jaxserve.reports import Reports
from jaxserve.scheduling.retelling import arrived
from jaxserve.scheduling.running import Row, Running, progressed
from jaxserve.scheduling.scheduler import Observed, Scheduler

_STATE = (
    "scheduler",
    "_future",
    "live",
    "by_index",
    "_answers",
    "_outputs",
    "_held",
    "submitted",
)
"""What of it is in a snapshot."""


class Clients:
    """Live requests, by their callers' names.

    Args:
      scheduler: serves them. reports: takes their events.
      now: seconds on the engine's clock.

    Attributes:
      live: what is told of each, by request id.
      by_index: each sample, by submission index.
      submitted: submission indices that are taken.
    """

    def __init__(
        self, scheduler: Scheduler, reports: Reports, now: Callable[[], float]
    ):
        self.scheduler = scheduler
        self._reports = reports
        self._now = now
        self._future: list[tuple[float, int, Live]] = []  # heap by arrival
        self.live: dict[str, Answer] = {}
        self.by_index: dict[int, Live] = {}
        self._answers: dict[int, Answer] = {}  # by submission index of each sample
        # To be told next, by the first sample's submission index.
        self._outputs: dict[int, Answer] = {}
        self._held: dict[int, tuple[Live, str, float]] = {}  # complete, not answered
        self.submitted = 0

    def state(self) -> dict[str, Any]:
        """All that it knows, for a snapshot."""
        return {name: getattr(self, name) for name in _STATE}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from another's state."""
        for name in _STATE:
            setattr(self, name, state[name])

    def holds_nothing(self) -> bool:
        """Whether no map has an entry left."""
        mine = self.live or self.by_index or self._answers or self._future
        return not (mine or self._outputs or self._held)

    @property
    def next_arrival_s(self) -> float:
        """When the next request arrives; infinity if none is to come."""
        return self._future[0][0] if self._future else math.inf

    @property
    def num_future(self) -> int:
        """Requests that have not arrived."""
        return len(self._future)

    # They come and go -----------------------------------------------------------------

    def check_new(self, request_id: str) -> None:
        """Refuse a name that cannot be a new request's."""
        if not isinstance(request_id, str) or not request_id:
            raise ValueError(f"request_id={request_id!r} must be a non-empty string")
        if request_id in self.live:
            raise ValueError(
                f"request_id={request_id!r} is in use by a request that has not ended; "
                "choose another id, or abort that one first"
            )

    def submit(self, live: Live, answer: Answer) -> None:
        """Another sample, which arrives when it is time."""
        request = live.request
        answer.add(live)
        self.submitted += 1
        self.by_index[request.index] = live
        self._answers[request.index] = answer
        heapq.heappush(self._future, (request.arrival_s, request.index, live))

    def arrive(self) -> None:
        """Let in who is due."""
        now_s = self._now()
        while self._future and self._future[0][0] <= now_s:
            _, _, live = heapq.heappop(self._future)
            self.scheduler.add(live.request)
            self._emit(live, arrived(live.request, self._now()))

    def abort(self, answer: Answer) -> None:
        """End every sample of a request now."""
        for live in answer.alive():
            self._abort(live)
        self._tell_caller(answer)
        self.answer_held()

    def _abort(self, live: Live) -> None:
        waits = [entry for entry in self._future if entry[2] is not live]
        arrived = len(waits) == len(self._future)
        if not arrived:
            self._future = waits
            heapq.heapify(self._future)
        running = self.scheduler.resident(live.request)
        if running and self.scheduler.holds_answers:
            self._tell_progress(live, running, 0, len(live.request.output))
        self._finish(live, "abort", arrived=arrived)

    def _finish(
        self, live: Live, reason: str, *, arrived: bool = True, late_s: float = 0.0
    ) -> None:
        request = live.request
        self._held.pop(request.index, None)
        request.finish_reason = reason
        live.finish()
        if arrived:
            self.scheduler.end(request)
        else:
            self.scheduler.leave_family(request)
        del self.by_index[request.index]
        if self._answers.pop(request.index).finished:
            del self.live[request.request_id]
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

    # What they get --------------------------------------------------------------------

    def absorb(self, seen: Observed, span_s: float) -> None:
        """Take in a request's new tokens.

        Args:
          span_s: how long the launch took.
        """
        running, request = seen.running, seen.running.request
        live = self.by_index[request.index]
        reason, cut = live.absorb(seen.first_output, seen.stopped)
        self.scheduler.counters.dropped_tokens += cut
        new = len(request.output) - seen.first_output
        self._reports.accounts.output_tokens += new
        told = 0 if self.scheduler.holds_answers else new
        self._tell_progress(live, running, seen.prompt_tokens, told)
        if reason:
            late = seen.steps - (seen.sampled - cut)  # steps after the last token kept
            self._end(live, reason, span_s * late / max(seen.steps, 1))
        elif told:
            self._tell_caller(self._answers[request.index])

    def conclude(self, rows: Sequence[Row], done: Leap) -> None:
        """End the requests that the last launch of a leap completed."""
        for row, tokens, stopped in zip(rows, done.tokens, done.done, strict=True):
            if not tokens:
                continue
            request = row.running.request
            live = self.by_index[request.index]
            reason, _ = live.absorb(len(request.output) - len(tokens), stopped)
            told = live.streams and not self.scheduler.holds_answers
            if reason:
                self._end(live, reason, 0.0)
            elif told:
                self._tell_caller(self._answers[request.index])
        self.answer_held()

    def _end(self, live: Live, reason: str, late_s: float) -> None:
        """The request's output is complete; its caller hears of it, unless it waits
        for its batch."""
        request = live.request
        if self.scheduler.holds_answers:
            self.scheduler.hold(request)
            self._held[request.index] = (live, reason, self._now() - late_s)
            return
        answer = self._answers[request.index]
        self._finish(live, reason, late_s=late_s)
        self._tell_caller(answer)

    def answer_held(self) -> None:
        """Give the whole answers that waited for the rest of their static batch."""
        for running in self.scheduler.answered():
            self._answer(running)

    def _answer(self, running: Running) -> None:
        """Give a whole answer that waited for the rest of its static batch."""
        live, reason, complete_s = self._held[running.request.index]
        self._tell_progress(live, running, 0, len(running.request.output))
        answer = self._answers[running.request.index]
        self._finish(live, reason, late_s=self._now() - complete_s)
        self._tell_caller(answer)

    def take_outputs(self) -> list[RequestOutput]:
        """What is to be told, once."""
        answers, self._outputs = self._outputs, {}
        return [answer.output() for answer in answers.values()]

    @property
    def has_outputs(self) -> bool:
        """Whether there is something to tell."""
        return bool(self._outputs)

    def _tell_caller(self, answer: Answer) -> None:
        """There may be something new to tell."""
        if answer.told:
            self._outputs[answer.index] = answer

    # Events ---------------------------------------------------------------------------

    def publish(self) -> None:
        """Tell what the scheduler did with requests."""
        for event in self.scheduler.take_events():
            live = self.by_index.get(event.data["index"])
            if live:
                live.note(event)
            self._reports.add(event)

    def _tell(
        self, live: Live, kind: str, *, arrived: bool = True, **data: Any
    ) -> None:
        """Emit an event of a request; the policy hears of those that have arrived."""
        request = live.request
        event = Event(
            kind, self._now(), request.request_id, {"index": request.index, **data}
        )
        self._emit(live, event, heard=arrived)

    def _emit(self, live: Live, event: Event, *, heard: bool = True) -> None:
        if heard:
            self.scheduler.note(event)
        live.note(event)
        self._reports.add(event)

    def _tell_progress(
        self, live: Live, running: Running, prompt_tokens: int, output_tokens: int
    ) -> None:
        now_s = self._now()
        live.took([now_s] * output_tokens)
        if self.scheduler.listens or self._reports.wanted:
            event = progressed(running, now_s, prompt_tokens, output_tokens)
            self.scheduler.note(event)
            self._reports.add(event)
