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
from jaxserve.scheduling.below import FromBelow
from jaxserve.scheduling.decisions import Decisions, Loss
from jaxserve.scheduling.incoming import Incoming
from jaxserve.scheduling.plan_builder import PlanBuilder
from jaxserve.scheduling.preemption import Way
from jaxserve.scheduling.ranking import Ranking
from jaxserve.scheduling.residents import Residents, Restored
from jaxserve.scheduling.running import Row, Running
from jaxserve.scheduling.swap_space import SwapSpace


@dataclasses.dataclass
class Counters:
    """Totals since the scheduler was made; tokens unless named otherwise."""

    prefix_queries_tokens: int = 0  # prompt tokens looked up at first admissions
    prefix_hits_tokens: int = 0  # those found, in any tier
    host_hits_tokens: int = 0  # of these, copied back from the host
    disk_hits_tokens: int = 0  # and read from disk
    forked_tokens: int = 0  # context tokens that forks took over
    resumed_hits_tokens: int = 0  # context tokens found by resumed requests
    recomputed_tokens: int = 0  # context tokens computed again by resumed requests
    preemptions: int = 0  # requests that lost their slot
    preemptions_by_swap: int = 0  # those whose KV went to the host
    preemptions_by_disk: int = 0  # and to disk
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
        incoming: Incoming,
        ranking: Ranking,
        books: Books,
        plan: PlanBuilder,
        now_s: float,
        *,
        admitting: bool = True,
    ):
        self.admitting = admitting
        self._config = config
        self._shape = shape
        self._residents = residents
        self._swaps = swaps
        self._incoming = incoming
        self._ranking = ranking
        self._books = books
        self._plan = plan
        self._now_s = now_s
        self._below = FromBelow(
            residents, swaps, incoming, plan, now_s, shape.block_size
        )
        static = config.batching == "static"
        self._apart = static or config.prefill == "prefill_first"  # prompts, decodes
        self._blocked: list[Request] = []  # waiting for memory, first in rank first
        self._to_decode: set[int] = set()  # whose decodes go before any prompt
        # Slots are filled from the host after the launch: no row, and no victim yet.
        self._restored: set[int] = set()
        self._copied: set[int] = set()  # whose columns forks copy: no victims either

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
        request = running.request
        if chunk:
            tokens = request.tokens(start, start + chunk)
            follow = _follow(request, start + chunk)
            self._plan.add_chunk(running.slot, steps, start, tokens, follow)
            row = row._replace(scored=follow >= 0)
            self._residents.name_columns(self._plan, running, start + chunk, fresh=True)
        else:
            self._plan.add_decode(running.slot, steps)
        request.computed.rows = max(request.computed.rows, start + rows)
        return row

    def _preempt(self, victim: Running) -> None:
        """Take the victim's slot and blocks; what it computed is kept below the device,
        or found in the cache, or computed again."""
        request, slot, lost = victim.request, victim.slot, victim.planned
        residents, index = self._residents, self._residents.index
        self._to_decode.discard(request.index)
        residents.release(self._plan, victim)  # names what can be named
        way = self._way_out(victim)
        if way != "recompute":
            mine = [h for h in victim.handles if index.pins(h) == 0]
            columns = range(len(victim.handles), self._shape.blocks(lost))
            if way == "swap":
                self._swaps.take(self._plan, victim, columns, len(mine))
            else:
                labels = [(h, index.label(h)) for h in mine]
                named = [(h, label) for h, label in labels if label is not None]
                self._swaps.take_to_disk(self._plan, victim, columns, named)
        request.preemptions += 1
        self._books.counters.preemptions += 1
        self._books.counters.preemptions_by_swap += way == "swap"
        self._books.counters.preemptions_by_disk += way == "disk"
        current = victim.weight_version == residents.weight_version
        self._books.keys[request.index] = victim.keys if current else []
        self._ranking.touch(request)
        self._tell("preempted", request, slot=slot, mode=way, lost_tokens=lost)
        self.admitting = False

    def preempt_all(self) -> None:
        """Take everybody off."""
        for running in self._may_give_way():
            self._preempt(running)

    def _way_out(self, victim: Running) -> Way:
        """What becomes of the KV of a victim that has left its slot."""
        pins, shape = self._residents.index.pins, self._shape
        # Blocks that another running request uses stay whatever happens. Of the others
        # nobody knows, so room is needed for all of them.
        shared = sum(pins(handle) > 0 for handle in victim.handles)
        blocks = shape.blocks(victim.planned)
        tiers, names = self._swaps.tiers, self._residents.index
        labels = [names.label(h) for h in victim.handles if pins(h) == 0]
        stored = sum(label is not None and tiers.holds(label.key) for label in labels)
        lost = Loss(
            input_tokens=len(victim.request.prompt),
            rows=victim.planned,
            blocks=blocks,
            named=len(victim.handles),
            shared=shared,
            stored=stored,
        )
        room: list[Way] = ["recompute"]
        if victim.weight_version == self._residents.weight_version:
            if blocks - shared <= tiers.room_in_pool():
                room.append("swap")
            # What is there of it can no longer make room for the rest.
            if tiers.has_disk and blocks <= tiers.room_on_disk():
                room.append("disk")
        others = len(self._residents.running)
        index = victim.request.index
        return self._books.decisions.choose(index, lost, room, others)

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
        kept = self._restored | self._copied
        return [r for index, r in running if index not in kept]

    def admit(self, request: Request) -> Row | None:
        """The first row of a waiting request; None if it has to wait."""
        residents, index = self._residents, request.index
        limit = self._config.skip_limit
        if any(r.skipped >= limit for r in self._blocked):
            self.admitting = False
            return None
        keys = self._books.keys[index]
        usable, hits = residents.match(request, keys)
        swapped = index in self._swaps.waiting
        below = self._below.swapped(request, len(hits)) if swapped else None
        if swapped and below is None:
            self._swaps.drop(index)
            self._books.decisions.forget(index)
            swapped = False
        if below is None:
            below = self._below.cached(request, keys, len(hits), usable)
        if below.waits:
            return None  # others may pass until it has come
        restored, source = below.restored, None
        if not (restored or swapped):
            if len(hits) < usable and residents.produced_soon(keys[len(hits)]):
                return None  # another computes its next block: wait, then share it
            if self._is_before_its_source(request):
                return None
            restored, source = self._fork(request, len(hits))
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
        # There is room: now what is below is worth fetching.
        if below.places and self._below.ask(request, keys, len(hits), below.places):
            residents.index.unpin(hits)
            return None
        for victim in victims:
            self._preempt(victim)
        if source is not None and source.released:
            restored = None  # it gave way: compute its share again
        for passed in self._blocked:
            passed.skipped += 1
        if restored:
            # Its blocks must be free when the launch ends, not only possible.
            need = self._shape.blocks(restored.rows) - len(hits)
            if residents.budget.secure(self._plan, need) < need:
                residents.index.unpin(hits)
                return None  # more than a plan can evict; the next one goes on
        running = self.take(request, hits, restored)
        if restored:
            self._restored.add(index)
            if source is not None:
                self._copied.add(source.request.index)
            return None  # its row is the next launch's, when it has its blocks
        return self.place(running)

    def _is_before_its_source(self, request: Request) -> bool:
        """Whether a fork should wait, for whom it was forked from comes first."""
        first = request.forked_from
        if first is None or request.num_cached_tokens is not None:
            return False
        running = self._residents.running.get(first)
        if running is None:  # it waits for its first slot, or has had one
            return self._ranking.is_new(first)
        behind = running.known_rows < request.shared
        return behind and self._residents.runs(running)

    def _fork(
        self, request: Request, hits: int
    ) -> tuple[Restored | None, Running | None]:
        """What a fork gets beside its cached columns, and from whose slot."""
        rows, size = request.shared, self._shape.block_size
        if request.forked_from is None or not rows or hits != rows // size:
            return None, None
        # It goes on to decode, or computes the last token of its prompt itself.
        decodes = bool(request.output) and rows == request.num_tokens - 1
        context = rows if decodes else request.num_tokens
        if rows % size == 0:
            return (Restored((), rows, context, 0) if decodes else None), None
        source = self._residents.source(request)
        if source is None:
            return None, None
        return Restored((), rows, context, 0, source=source.slot), source

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
        self._swaps.drop(request.index)
        self._incoming.drop(request.index, restored.fetches if restored else ())
        self._ranking.touch(request)
        self._books.decisions.resume(running)
        self._count_admission(request, running, len(hits), restored)
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
        spare = self._spare(request)
        lower: list[Running] = []
        if self._ranking.last_class > klass:
            lower += [r for r in self._may_give_way() if key(r.request).klass > klass]
            lower.sort(key=lambda r: key(r.request))
        victims: list[Running] = []
        while True:
            releases = [(v.slot, v.handles) for v in victims]
            possible = residents.budget.after_release(releases)
            staying = len(residents.running) - len(victims)
            free = possible - spare * staying
            if free >= need and (residents.slot_free or victims):
                return victims
            if not lower:
                return None
            victims.append(lower.pop())
            need -= residents.needs(victims[-1])

    def _spare(self, request: Request) -> int:
        """Blocks that an admission leaves for the growth of each running request.

        So whoever comes back after a preemption stays for the steps that fill a block,
        at least: it is not preempted for memory again until somebody has filled one.
        """
        running = self._residents.running.values()
        if request.preemptions or any(r.request.preemptions for r in running):
            return self._shape.blocks(self._shape.decode_steps)
        return 0

    def _count_admission(
        self, request: Request, running: Running, hits: int, restored: Restored | None
    ) -> None:
        counters, size = self._books.counters, self._shape.block_size
        first = request.num_cached_tokens is None
        if restored:
            blocks = self._shape.blocks(restored.rows) - hits
            counters.restored_blocks += blocks * bool(restored.fetches)
            self._swaps.tiers.use(running.keys[: hits + blocks])
        if first and request.forked_from is not None:
            # No news of the cache: what they share is known to be there.
            request.num_cached_tokens = min(running.cached, len(request.prompt))
            counters.forked_tokens += running.cached
        elif first:
            request.num_cached_tokens = running.cached
            if request.params.reads_cache:
                counters.prefix_queries_tokens += len(request.prompt)
            counters.prefix_hits_tokens += running.cached
            if restored:
                counters.host_hits_tokens += (blocks - restored.from_disk) * size
                counters.disk_hits_tokens += restored.from_disk * size
        else:
            counters.resumed_hits_tokens += running.cached
            if restored is None or not restored.resumed:
                counters.recomputed_tokens += running.context - running.cached
        self._tell(
            "admitted",
            request,
            slot=running.slot,
            cached_tokens=hits * size,
            restored_tokens=running.planned - hits * size,
            context_tokens=running.context,
            first=first,
        )

    def _tell(self, kind: str, request: Request, **data: object) -> None:
        data = {"index": request.index, **data}
        event = Event(kind, self._now_s, request.request_id, data)
        self._books.events.append(event)
        self._ranking.note(event)


def _follow(request: Request, end: int) -> int:
    """`StepPlan.follow` of a chunk up to position `end`."""
    prompt = request.prompt
    # The last prompt token is scored after the one before it. What was computed before
    # a preemption has been scored then.
    known = request.computed.rows >= min(end, len(prompt) - 1)
    if known or request.params.prompt_logprobs is None:
        return -1
    return prompt[end] if end < len(prompt) else 0
