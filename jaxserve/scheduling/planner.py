"""The decisions of one plan: who goes on, who is admitted, who gives way.

Owns who is offered a row, by batching and prefill mode, and the order of remedies when
something does not fit: evict, shrink, preempt, wait. Never sees a launch's output or
the time's passing; a planner lives for one plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

from jaxserve.config import EngineConfig, EngineShape
from jaxserve.core import Event, Request
from jaxserve.scheduling.decisions import Decisions, Loss
from jaxserve.scheduling.plan_builder import PlanBuilder
from jaxserve.scheduling.ranking import Ranking
from jaxserve.scheduling.residents import Residents, Restored
from jaxserve.scheduling.running import Row, Running
from jaxserve.scheduling.swap_space import SwapSpace


@dataclasses.dataclass
class Counters:
    """Totals since the scheduler was made; tokens unless named otherwise."""

    prefix_queries_tokens: int = 0  # prompt tokens looked up at first admissions
    prefix_hits_tokens: int = 0  # those found
    resumed_hits_tokens: int = 0  # context tokens found by resumed requests
    recomputed_tokens: int = 0  # context tokens computed again by resumed requests
    preemptions: int = 0  # requests that lost their slot
    preemptions_by_swap: int = 0  # those whose KV went to the host
    spilled_blocks: int = 0  # copied to the host
    restored_blocks: int = 0  # copied back
    dropped_tokens: int = 0  # sampled after a stop string or an abort


@dataclasses.dataclass
class Books:
    """What outlives a plan, beside the residents and the ranking.

    Attributes:
      keys: known block keys of each waiting request, by submission index.
      events: of requests in slots, not yet taken.
      decisions: how victims were preempted.
    """

    decisions: Decisions
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
        swaps: SwapSpace,
        ranking: Ranking,
        books: Books,
        plan: PlanBuilder,
        now_s: float,
    ):
        self.admitting = True
        self._config = config
        self._shape = shape
        self._residents = residents
        self._swaps = swaps
        self._ranking = ranking
        self._books = books
        self._plan = plan
        self._now_s = now_s
        static = config.batching == "static"
        self._apart = static or config.prefill == "prefill_first"  # prompts, decodes
        self._blocked: list[Request] = []  # waiting for memory, first in rank first
        self._to_decode: set[int] = set()  # whose decodes go before any prompt
        # Slots are filled from the host after the launch: no row, and no victim yet.
        self._restored: set[int] = set()

    def fill(self, in_flight: Collection[int]) -> list[Row]:
        """The rows of the plan.

        Args:
          in_flight: submission indices with launches not read yet: those that wait may
            end in them.
        """
        if self._config.prefill == "prefill_first":
            rows = self._offer(lambda r: not r.prefilled, in_flight)
            return rows or self._offer(lambda r: r.prefilled, None)
        if self._config.prefill == "decode_first":
            running = self._residents.running.values()
            self._to_decode = {r.request.index for r in running if r.prefilled}
        return self._offer(lambda r: True, in_flight)

    def _offer(
        self, which: Callable[[Running], bool], in_flight: Collection[int] | None
    ) -> list[Row]:
        """Rows of the running requests of a kind and, unless in_flight is None, of
        newcomers: first in rank first served."""
        running, rows, ranking = self._residents.running, [], self._ranking
        left, joins = len(running), in_flight is not None
        for request in ranking.in_order() if joins else ranking.running():
            if self._plan.tokens_left == 0 or not (left or (joins and self.admitting)):
                break
            resident, row = running.get(request.index), None
            if request.index in self._restored:
                left -= 1
            elif resident:
                left -= 1
                self._to_decode.discard(request.index)
                fits = resident.prefilled or self._prompt_budget > 0
                row = self._go_on(resident) if fits and which(resident) else None
            elif self._prompt_budget <= 0:
                self.admitting = False
            elif in_flight is not None and request.index not in in_flight:
                row = self.admit(request) if self.admitting else None
            if row:
                rows.append(row)
        return rows

    def _go_on(self, running: Running) -> Row | None:
        """The next row of a running request; None if it sits this launch out."""
        row = self.place(running)
        if row is None:
            self._preempt_behind(running)
            row = self.place(running)
        return row

    @property
    def _prompt_budget(self) -> int:
        """Tokens left for prompts: all, but for decodes that go first."""
        return self._plan.tokens_left - len(self._to_decode)

    def _chunk(self, running: Running) -> int:
        left = running.context - running.planned
        if left <= 0:
            return 0
        cap = self._config.max_chunk_tokens or left
        return min(left, cap, self._prompt_budget)

    def _steps(self, running: Running) -> int:
        steps = min(self._shape.decode_steps, running.tokens_left)
        if self._apart and not running.prefilled:
            steps = min(steps, 1)  # further steps would be decodes
        allowed = self._ranking.allow(running.request)
        if allowed is not None and allowed <= steps:
            steps = max(allowed, 1)
            self._ranking.touch(running.request)  # spent: it may rank lower now
        return steps

    def place(self, running: Running) -> Row | None:
        """Plan the request's next row as far as room is sure; None if there is none."""
        chunk, start = self._chunk(running), running.planned
        steps = self._steps(running) if start + chunk >= running.context else 0
        rows = chunk + max(steps - 1, 0) if chunk else steps  # as Row.new_rows
        room = self._residents.budget.extend(self._plan, running.slot, start + rows)
        room -= start
        if room <= 0:
            return None
        if room < chunk:
            chunk, steps = room, 0
        else:
            steps = min(steps, room - chunk + (1 if chunk else 0))
        row = Row(running, chunk, steps)
        rows = row.new_rows
        self._residents.place(running, start + rows)
        running.sampling += steps
        running.pending += rows
        if chunk:
            tokens = running.request.tokens(start, start + chunk)
            self._plan.add_chunk(running.slot, steps, start, tokens)
            self._residents.name_columns(self._plan, running, start + chunk, fresh=True)
        else:
            self._plan.add_decode(running.slot, steps)
        return row

    def _preempt(self, victim: Running) -> None:
        """Take the victim's slot and blocks; what it computed is kept on the host, or
        found in the cache, or computed again."""
        request, slot, lost = victim.request, victim.slot, victim.planned
        self._to_decode.discard(request.index)
        swap = self._swaps_out(victim)
        self._residents.release(self._plan, victim)
        if swap:
            named, pins = victim.handles, self._residents.index.pins
            columns = range(len(named), self._shape.blocks(lost))
            promised = sum(pins(handle) == 0 for handle in named)
            self._swaps.take(self._plan, victim, columns, promised)
        request.preemptions += 1
        self._books.counters.preemptions += 1
        self._books.counters.preemptions_by_swap += swap
        self._books.keys[request.index] = victim.keys
        self._ranking.touch(request)
        mode = "swap" if swap else "recompute"
        self._tell("preempted", request, slot=slot, mode=mode, lost_tokens=lost)
        self.admitting = False

    def _swaps_out(self, victim: Running) -> bool:
        """Whether to keep a victim's KV on the host."""
        pins, shape = self._residents.index.pins, self._shape
        # Blocks that another running request uses stay whatever happens. Of the others
        # nobody knows, so room is needed for all of them.
        shared = sum(pins(handle) > 1 for handle in victim.handles)
        blocks = shape.blocks(victim.planned)
        lost = Loss(
            input_tokens=len(victim.request.prompt),
            rows=victim.planned,
            blocks=blocks,
            named=len(victim.handles),
            shared=shared,
        )
        room = blocks - shared <= self._swaps.free
        return self._books.decisions.choose(victim.request.index, lost, room=room)

    def _preempt_behind(self, running: Running) -> None:
        """Make a block possible from running requests behind, farthest first."""
        key = self._ranking.key
        mine = key(running.request)
        behind = [r for r in self._may_give_way() if key(r.request) > mine]
        behind.sort(key=lambda r: key(r.request))
        while behind and self._residents.budget.possible() == 0:
            self._preempt(behind.pop())

    def _may_give_way(self) -> list[Running]:
        running = self._residents.running.items()
        return [r for index, r in running if index not in self._restored]

    def admit(self, request: Request) -> Row | None:
        """The first row of a waiting request; None if it has to wait."""
        residents, index = self._residents, request.index
        limit = self._config.skip_limit
        if any(r.skipped >= limit for r in self._blocked):
            self.admitting = False
            return None
        keys = self._books.keys[index]
        usable, hits = residents.match(request, keys)
        restored = None
        if index in self._swaps.waiting:
            restored = self._to_restore(request, len(hits))
            if restored is None:
                self._swaps.drop(index)
                self._books.decisions.forget(index)
        if restored:
            missing = not self._swaps.has_arrived(restored.names)
            if missing and self._swaps.fetches(index, restored.names):
                return None  # others may pass until it has arrived
        elif len(hits) < usable and residents.produced_soon(keys[len(hits)]):
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
        if restored and not self._swaps.has_arrived(restored.names):
            residents.index.unpin(hits)  # there is room: now it is worth fetching
            self._swaps.fetch(self._plan, index, restored.names)
            return None
        for victim in victims:
            self._preempt(victim)
        for passed in self._blocked:
            passed.skipped += 1
        if restored:
            # Its blocks must be free when the launch ends, not only possible.
            need = len(restored.names)
            if residents.budget.secure(self._plan, need) < need:
                residents.index.unpin(hits)
                return None  # more than a plan can evict; the next one goes on
        running = self.take(request, hits, restored)
        if restored:
            self._swaps.drop(index)
            self._restored.add(index)
            self._books.counters.restored_blocks += len(restored.names)
            return None  # its row is the next launch's, when it has its blocks
        return self.place(running)

    def _to_restore(self, request: Request, hits: int) -> Restored | None:
        """What a swapped request gets back behind its cached columns.

        None: something of it is lost, or others have computed more of its prompt
        meanwhile than it had.
        """
        stay = self._swaps.waiting[request.index].stay
        rows = stay.known_rows
        if hits * self._shape.block_size > rows:
            return None
        columns = range(hits, self._shape.blocks(rows))
        names = self._swaps.payloads(request.index, columns)
        if names is None:
            self._swaps.lost += 1
            return None
        # It goes on to decode, or with what its prompt still lacks.
        context = rows if stay.prefilled else request.num_tokens
        return Restored(names, rows, context)

    def hits(self, request: Request) -> list[int]:
        """Handles of the cached columns that a waiting request can adopt in this plan,
        as many as its edits have room for."""
        hits = self._residents.match(request, self._books.keys[request.index])[1]
        while not self._plan.can_adopt(len(hits)):
            hits.pop()
        return hits

    def take(
        self, request: Request, hits: list[int], restored: Restored | None = None
    ) -> Running:
        """Admit a request for which there is room; its cached columns are pinned."""
        keys = self._books.keys.pop(request.index)
        running = self._residents.take(self._plan, request, keys, hits, restored)
        self._ranking.touch(request)
        self._books.decisions.resume(running)
        self._count_admission(request, running, restored=restored is not None)
        return running

    def _room_for(self, request: Request, hits: int) -> list[Running] | None:
        """Whom to preempt so that a slot is free and the whole context fits.

        Only requests of a strictly larger class give way, the farthest first. None: no
        set of them is enough, and none is preempted.
        """
        residents, key = self._residents, self._ranking.key
        klass = key(request).klass
        if not residents.slot_free and self._ranking.last_class <= klass:
            return None
        need = self._shape.blocks(request.num_tokens) - hits + residents.outstanding
        lower: list[Running] = []
        if self._ranking.last_class > klass:
            lower += [r for r in self._may_give_way() if key(r.request).klass > klass]
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

    def _count_admission(
        self, request: Request, running: Running, *, restored: bool
    ) -> None:
        cached, first = running.cached, request.num_cached_tokens is None
        if first:
            request.num_cached_tokens = cached
            self._books.counters.prefix_queries_tokens += len(request.prompt)
            self._books.counters.prefix_hits_tokens += cached
        else:
            self._books.counters.resumed_hits_tokens += cached
            if not restored:
                self._books.counters.recomputed_tokens += running.context - cached
        self._tell(
            "admitted",
            request,
            slot=running.slot,
            cached_tokens=cached,
            restored_tokens=running.planned - cached,
            context_tokens=running.context,
            first=first,
        )

    def _tell(self, kind: str, request: Request, **data: object) -> None:
        data = {"index": request.index, **data}
        event = Event(kind, self._now_s, request.request_id, data)
        self._books.events.append(event)
        self._ranking.note(event)
