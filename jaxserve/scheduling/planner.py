"""The decisions of one plan: who goes on, who is admitted, who gives way.

Owns the order of remedies when something does not fit: evict, shrink, preempt, wait.
Never sees a launch's output or the time's passing; a planner lives for one plan.
"""

from __future__ import annotations

import dataclasses

from jaxserve.config import EngineConfig, EngineShape
from jaxserve.core import Event, Request
from jaxserve.scheduling.plan_builder import PlanBuilder
from jaxserve.scheduling.ranking import Ranking
from jaxserve.scheduling.residents import Residents
from jaxserve.scheduling.running import Row, Running


@dataclasses.dataclass
class Counters:
    """Totals since the scheduler was made; tokens unless named otherwise."""

    prefix_queries_tokens: int = 0  # prompt tokens looked up at first admissions
    prefix_hits_tokens: int = 0  # those found
    resumed_hits_tokens: int = 0  # context tokens found by resumed requests
    recomputed_tokens: int = 0  # context tokens computed again by resumed requests
    preemptions: int = 0  # requests that lost their slot
    dropped_tokens: int = 0  # sampled after a stop string or an abort


@dataclasses.dataclass
class Books:
    """What outlives a plan, beside the residents and the ranking.

    Attributes:
      keys: known block keys of each waiting request, by submission index.
      events: admissions and preemptions not yet taken.
    """

    counters: Counters = dataclasses.field(default_factory=Counters)
    keys: dict[int, list[bytes]] = dataclasses.field(default_factory=dict)
    events: list[Event] = dataclasses.field(default_factory=list)


class Planner:
    """Fills one plan.

    Attributes:
      admitting: whether this plan still takes in waiting requests. It stops once a
        request waits that none may pass, or memory had to be preempted for.
    """

    def __init__(
        self,
        config: EngineConfig,
        shape: EngineShape,
        residents: Residents,
        ranking: Ranking,
        books: Books,
        plan: PlanBuilder,
        now_s: float,
    ):
        self.admitting = True
        self._config = config
        self._shape = shape
        self._residents = residents
        self._ranking = ranking
        self._books = books
        self._plan = plan
        self._now_s = now_s
        self._blocked: list[Request] = []  # waiting for memory, first in rank first

    def go_on(self, running: Running) -> Row | None:
        """The next row of a running request; None if it sits this launch out."""
        row = self._place(running)
        if row is None:
            self._preempt_behind(running)
            row = self._place(running)
        return row

    def _chunk(self, running: Running) -> int:
        left = max(0, running.context - running.planned)
        cap = self._config.max_chunk_tokens or left
        return min(left, cap, self._plan.tokens_left)

    def _steps(self, running: Running) -> int:
        allowed = self._ranking.allow(running.request)
        steps = min(self._shape.decode_steps, running.tokens_left)
        return steps if allowed is None else min(steps, max(allowed, 1))

    def _place(self, running: Running) -> Row | None:
        """Plan the request's next row as far as room is sure; None if there is none."""
        chunk, start = self._chunk(running), running.planned
        steps = self._steps(running) if start + chunk >= running.context else 0
        want = start + Row(running, chunk, steps).new_rows
        room = self._residents.budget.extend(self._plan, running.slot, want) - start
        if room <= 0:
            return None
        if room < chunk:
            chunk, steps = room, 0
        else:
            steps = min(steps, room - chunk + (1 if chunk else 0))
        row = Row(running, chunk, steps)
        self._residents.place(running, start + row.new_rows)
        running.sampling += steps
        running.pending += row.new_rows
        if chunk:
            tokens = running.request.tokens(start, start + chunk)
            self._plan.add_chunk(running.slot, steps, start, tokens)
            self._residents.name_columns(self._plan, running, start + chunk, fresh=True)
        else:
            self._plan.add_decode(running.slot, steps)
        return row

    def _preempt(self, victim: Running) -> None:
        """Take the victim's slot and blocks; it will compute its context again."""
        request, slot, lost = victim.request, victim.slot, victim.planned
        self._residents.release(self._plan, victim)
        request.preemptions += 1
        self._books.counters.preemptions += 1
        self._books.keys[request.index] = victim.keys
        self._ranking.touch(request)
        self._tell("preempted", request, slot=slot, mode="recompute", lost_tokens=lost)
        self.admitting = False

    def _preempt_behind(self, running: Running) -> None:
        """Make a block possible from running requests behind, farthest first."""
        key = self._ranking.key
        mine = key(running.request)
        behind = [r for r in self._residents.running.values() if key(r.request) > mine]
        behind.sort(key=lambda r: key(r.request))
        while behind and self._residents.budget.possible() == 0:
            self._preempt(behind.pop())

    def admit(self, request: Request) -> Row | None:
        """The first row of a waiting request; None if it has to wait."""
        residents, shape = self._residents, self._shape
        limit = self._config.skip_limit
        if any(r.skipped >= limit for r in self._blocked):
            self.admitting = False
            return None
        keys = self._books.keys[request.index]
        residents.extend_keys(request, keys)
        # A fully cached context still computes its last token, to sample from.
        usable = keys[: (request.num_tokens - 1) // shape.block_size]
        hits = residents.index.match(usable)
        if len(hits) < len(usable) and residents.produced_soon(usable[len(hits)]):
            return None  # another computes its next block: wait, then share it
        if not self._plan.can_adopt(len(hits)):
            return None
        residents.index.pin(hits)
        victims = self._room_for(request, len(hits))
        if victims is None:
            residents.index.unpin(hits)
            if residents.slot_free:
                self._blocked.append(request)
            else:
                self.admitting = False
            return None
        for victim in victims:
            self._preempt(victim)
        for passed in self._blocked:
            passed.skipped += 1
        running = residents.take(self._plan, request, keys, hits)
        del self._books.keys[request.index]
        self._ranking.touch(request)
        self._count_admission(request, running)
        return self._place(running)

    def _room_for(self, request: Request, hits: int) -> list[Running] | None:
        """Whom to preempt so that a slot is free and the whole context fits.

        Only requests of a strictly larger class give way, the farthest first. None: no
        set of them is enough, and none is preempted.
        """
        residents, key = self._residents, self._ranking.key
        need = self._shape.blocks(request.num_tokens) - hits + residents.outstanding()
        klass = key(request).klass
        lower = [r for r in residents.running.values() if key(r.request).klass > klass]
        lower.sort(key=lambda r: key(r.request))
        victims: list[Running] = []
        while True:
            releases = [(v.slot, v.handles) for v in victims]
            possible = residents.budget.after_release(releases)
            if possible >= need and (residents.slot_free or victims):
                return victims
            if not lower:
                return None
            victims.append(lower.pop())
            need -= residents.needs(victims[-1])

    def _count_admission(self, request: Request, running: Running) -> None:
        cached, first = running.planned, request.num_cached_tokens is None
        if first:
            request.num_cached_tokens = cached
            self._books.counters.prefix_queries_tokens += len(request.prompt)
            self._books.counters.prefix_hits_tokens += cached
        else:
            self._books.counters.resumed_hits_tokens += cached
            self._books.counters.recomputed_tokens += running.context - cached
        self._tell(
            "admitted",
            request,
            slot=running.slot,
            cached_tokens=cached,
            context_tokens=running.context,
            first=first,
        )

    def _tell(self, kind: str, request: Request, **data: object) -> None:
        data = {"index": request.index, **data}
        event = Event(kind, self._now_s, request.request_id, data)
        self._books.events.append(event)
        self._ranking.note(event)
