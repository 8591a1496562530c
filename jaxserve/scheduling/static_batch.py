"""Static batching: one batch at a time, from start to end.

Owns the rules of the baseline that continuous batching is measured against: who joins a
batch, and when it decodes and is over. Never preempts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from jaxserve.config import EngineShape
from jaxserve.core import Request
from jaxserve.scheduling.plan_builder import PlanBuilder
from jaxserve.scheduling.planner import Planner
from jaxserve.scheduling.ranking import Ranking
from jaxserve.scheduling.residents import Residents
from jaxserve.scheduling.running import Row, Running


class StaticBatches:
    """The batch that runs, and those whose last outputs are not read yet."""

    def __init__(self, shape: EngineShape, residents: Residents, ranking: Ranking):
        self._shape = shape
        self._residents = residents
        self._ranking = ranking
        self._unanswered: deque[list[Running]] = deque()  # oldest first

    @property
    def over(self) -> bool:
        """Whether the batch that holds the slots will sample no more, or none does."""
        return all(running.over for running in self._residents.running.values())

    def hold(self, request: Request) -> None:
        """The request's answer is complete: it waits for the rest of its batch."""
        running = self.stay(request)
        assert running is not None
        running.complete = True

    def stay(self, request: Request) -> Running | None:
        """The request's place in a batch that is not answered yet."""
        batches = (running for batch in self._unanswered for running in batch)
        return next((r for r in batches if r.request is request), None)

    def answered(self) -> list[Running]:
        """Requests whose batch is complete, and which may be answered now."""
        done: list[Running] = []
        while self._unanswered and all(
            r.complete or r.request.finish_reason is not None
            for r in self._unanswered[0]
        ):
            batch = self._unanswered.popleft()
            done += [r for r in batch if r.request.finish_reason is None]
        return done

    def fill(
        self, planner: Planner, plan: PlanBuilder, in_flight: Collection[int]
    ) -> list[Row]:
        """The rows of the plan: prompts until all are computed, then decodes."""
        running = self._residents.running
        if not running and planner.admitting:
            self._start(planner, in_flight)
        behind = [r for r in running.values() if not (r.prefilled or r.over)]
        rows = [planner.place(r) for r in behind if plan.tokens_left]
        if not behind:
            rows = [self._decode(planner, plan, r) for r in running.values()]
        return [row for row in rows if row is not None]

    def _decode(
        self, planner: Planner, plan: PlanBuilder, running: Running
    ) -> Row | None:
        if not running.over:
            return planner.place(running)
        plan.add_decode(running.slot, 0)  # computed as padding until the batch ends
        return Row(running, 0, 0)

    def _start(self, planner: Planner, in_flight: Collection[int]) -> None:
        """Admit in rank order what surely fits to its end, whatever the others need."""
        residents, promised = self._residents, 0
        batch: list[Running] = []
        for request in self._ranking.waiting():
            if not residents.slot_free:
                break
            if request.index in in_flight:
                continue
            hits = planner.hits(request)
            rows = len(request.prompt) + request.max_output_tokens - 1
            need = self._shape.blocks(rows) - len(hits)
            residents.index.pin(hits)
            if promised + need > residents.budget.possible():
                residents.index.unpin(hits)
                break
            promised += need
            batch.append(planner.take(request, hits))
        if batch:
            self._unanswered.append(batch)
