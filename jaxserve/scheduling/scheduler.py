"""Plans launches: who runs, how far, in which blocks. Policy-free, device-free.

Owns the requests that wait and run, and the order of decisions in a plan. Names and
counts only: it never sees a physical block, a device array or a clock (the time is an
argument). What ranks requests is the policy's; what fits is the budget's.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import NamedTuple

from jaxserve.block_count import BlockCount
from jaxserve.config import EngineConfig, EngineShape
from jaxserve.core import Event, Request, StepOutput, TokenLogprobs
from jaxserve.scheduling.plan_builder import PlanBuilder
from jaxserve.scheduling.policies import Policy, View
from jaxserve.scheduling.ranking import Ranking
from jaxserve.scheduling.residents import Residents
from jaxserve.scheduling.running import Launch, Row, Running


class Observed(NamedTuple):
    """What reading one launch told of one request."""

    request: Request
    slot: int
    prompt_tokens: int  # computed by the launch
    first_output: int  # where its new output tokens start
    stopped: bool  # its last token is a stop id


@dataclasses.dataclass
class Counters:
    """Totals since the scheduler was made; tokens unless named otherwise."""

    prefix_queries_tokens: int = 0  # prompt tokens looked up at first admissions
    prefix_hits_tokens: int = 0  # those found
    resumed_hits_tokens: int = 0  # context tokens found by resumed requests
    recomputed_tokens: int = 0  # context tokens computed again by resumed requests
    preemptions: int = 0  # requests that lost their slot
    dropped_tokens: int = 0  # sampled after a stop string or an abort


class _Admissions:
    """What the plan being built knows of the requests that it could not admit."""

    def __init__(self) -> None:
        self.open = True
        self.blocked: list[Request] = []  # waiting for memory, first in rank first


class Scheduler:
    """Continuous batching under a policy.

    Args:
      config, shape: of the engine.
      policy: orders the requests.
    """

    def __init__(self, config: EngineConfig, shape: EngineShape, policy: Policy):
        self._config = config
        self._shape = shape
        self._residents = Residents(shape, caching=config.enable_prefix_caching)
        self._ranking = Ranking(policy, self._view)
        self._keys: dict[int, list[bytes]] = {}  # of waiting requests
        self._unread: Counter[int] = Counter()  # launches in flight by submission index
        self._ended: list[Running] = []  # finished, slot not yet given back
        self._leaving: set[int] = set()  # slot given back, last output not yet read
        self._read = BlockCount(shape)  # exact, after the last launch read
        self._events: list[Event] = []
        self.counters = Counters()
        self.weight_version = 0

    # What it holds --------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return len(self._residents.running)

    @property
    def num_waiting(self) -> int:
        """Requests that hold none."""
        slots = self.num_running - len(self._ended)
        return len(self._ranking) - slots - len(self._leaving)

    @property
    def free_blocks(self) -> int:
        """Blocks free after every launch planned, at least."""
        return self._residents.budget.count.free

    @property
    def cached_blocks(self) -> int:
        """Blocks with a name: live handles, after every launch planned."""
        return self._residents.index.live

    @property
    def idle_cached_blocks(self) -> int:
        """Blocks with a name that no running request uses: evictable."""
        return self._residents.index.evictable

    @property
    def lost_blocks(self) -> int:
        """Full columns given up without a name: cache losses."""
        return self._residents.lost_blocks

    @property
    def has_requests(self) -> bool:
        """Whether any request is waiting or running."""
        return len(self._ranking) > 0

    @property
    def has_chores(self) -> bool:
        """Whether a plan would give something back though no request is left."""
        return bool(self._ended) or self._residents.index.has_forgotten

    def holds_nothing(self) -> bool:
        """Whether no map has an entry left of any request."""
        return not (
            self._residents.running
            or self._residents.producers
            or len(self._ranking)
            or self._keys
            or self._unread
            or self._ended
            or self._leaving
        )

    def _view(self, request: Request) -> View:
        running = self._residents.running.get(request.index)
        return View(
            index=request.index,
            arrival_s=request.arrival_s,
            prompt_tokens=len(request.prompt),
            output_tokens=len(request.output) + (running.sampling if running else 0),
            max_output_tokens=request.max_output_tokens,
            cached_tokens=request.num_cached_tokens,
            running=running is not None,
            preemptions=request.preemptions,
            priority=request.priority,
            user=request.user,
            deadline_s=request.deadline_s,
            tags=request.tags,
        )

    # Requests come and go -------------------------------------------------------------

    def add(self, request: Request) -> None:
        """A request arrived; it may be in the next plan."""
        self._ranking.add(request)
        self._keys[request.index] = []

    def end(self, request: Request) -> None:
        """The request ended: finished, stopped by its text, or aborted.

        Its slot is given back by the next plan; what launches in flight still sample
        for it is dropped.
        """
        running = self._residents.running.get(request.index)
        self._ranking.remove(request)
        self._keys.pop(request.index, None)
        self._leaving.discard(request.index)
        if running:
            self._ended.append(running)

    def note(self, event: Event) -> None:
        """Show the policy an event about a request."""
        self._ranking.note(event)

    def take_events(self) -> list[Event]:
        """Admissions and preemptions since the last call."""
        events, self._events = self._events, []
        return events

    def _tell(self, kind: str, now_s: float, request: Request, **data: object) -> None:
        event = Event(kind, now_s, request.request_id, {"index": request.index, **data})
        self._events.append(event)
        self._ranking.note(event)

    def reset_prefix_cache(self) -> None:
        """Forget every cached block; running requests keep what they use."""
        self._residents.index.reset()

    # Planning -------------------------------------------------------------------------

    def plan(self, now_s: float) -> Launch | None:
        """The next launch, from all that was observed; None if nothing is to do."""
        residents = self._residents
        plan = PlanBuilder(self._shape, self._config.max_num_batched_tokens)
        residents.index.begin_plan()
        for running in self._ended:
            residents.release(plan, running)
        self._ended.clear()
        for running in list(residents.running.values()):
            if running.prefilled and running.tokens_left == 0:
                # It will have finished by max_tokens for certain when this plan runs.
                residents.release(plan, running)
                self._leaving.add(running.request.index)
            else:
                self._name_known(plan, running)
        residents.flush(plan)
        self._ranking.refresh(now_s)
        rows: list[Row] = []
        admissions = _Admissions()
        current = sorted(
            (r.request for r in residents.running.values()), key=self._ranking.key
        )
        for request in self._ranking.in_order(current):
            if plan.tokens_left == 0:
                break
            running = residents.running.get(request.index)
            if running:
                row = self._continue(plan, running, now_s, admissions)
            elif admissions.open and request.index not in self._unread:
                row = self._admit(plan, request, now_s, admissions)
            else:
                row = None
            if row:
                rows.append(row)
        if plan.empty:
            return None
        rows.sort(key=lambda row: row.prompt_tokens > 0)  # stable: decode rows first
        for row in rows:
            self._unread[row.running.request.index] += 1
        return Launch(plan.build(self._config.seed), tuple(rows))

    def _name_known(self, plan: PlanBuilder, running: Running) -> None:
        full = running.known_rows // self._shape.block_size
        if full > len(running.handles):
            self._residents.keys(running.request, self.weight_version, running.keys)
            self._residents.name_columns(plan, running, running.known_rows, fresh=False)

    def _continue(
        self,
        plan: PlanBuilder,
        running: Running,
        now_s: float,
        admissions: _Admissions,
    ) -> Row | None:
        """The next row of a running request; None if it sits this launch out."""
        row = self._place(plan, running)
        if row is None:
            self._preempt_behind(plan, running, now_s, admissions)
            row = self._place(plan, running)
        return row

    def _chunk(self, plan: PlanBuilder, running: Running) -> int:
        left = max(0, running.context - running.planned)
        cap = self._config.max_chunk_tokens or left
        return min(left, cap, plan.tokens_left)

    def _steps(self, running: Running) -> int:
        allowed = self._ranking.allow(running.request)
        steps = min(self._shape.decode_steps, running.tokens_left)
        return steps if allowed is None else min(steps, max(allowed, 1))

    def _place(self, plan: PlanBuilder, running: Running) -> Row | None:
        """Plan the request's next row as far as room is sure; None if there is none."""
        chunk, start = self._chunk(plan, running), running.planned
        steps = self._steps(running) if start + chunk >= running.context else 0
        want = start + Row(running, chunk, steps).new_rows
        room = self._residents.budget.extend(plan, running.slot, want) - start
        if room <= 0:
            return None
        if room < chunk:
            chunk, steps = room, 0
        else:
            steps = min(steps, room - chunk + (1 if chunk else 0))
        row = Row(running, chunk, steps)
        self._residents.resize(running, start + row.new_rows)
        running.sampling += steps
        running.pending += row.new_rows
        if chunk:
            tokens = running.request.tokens(start, start + chunk)
            plan.add_chunk(running.slot, steps, start, tokens)
            self._residents.name_columns(plan, running, start + chunk, fresh=True)
        else:
            plan.add_decode(running.slot, steps)
        return row

    def _preempt(self, plan: PlanBuilder, victim: Running, now_s: float) -> None:
        """Take the victim's slot and blocks; it will compute its context again."""
        request, slot, lost = victim.request, victim.slot, victim.planned
        self._residents.release(plan, victim)
        request.preemptions += 1
        self.counters.preemptions += 1
        self._keys[request.index] = victim.keys
        self._ranking.touch(request)
        self._tell(
            "preempted", now_s, request, slot=slot, mode="recompute", lost_tokens=lost
        )

    def _preempt_behind(
        self,
        plan: PlanBuilder,
        running: Running,
        now_s: float,
        admissions: _Admissions,
    ) -> None:
        """Make a block possible from running requests behind, farthest first."""
        key = self._ranking.key
        mine = key(running.request)
        behind = [r for r in self._residents.running.values() if key(r.request) > mine]
        behind.sort(key=lambda r: key(r.request))
        while behind and self._residents.budget.possible() == 0:
            self._preempt(plan, behind.pop(), now_s)
            admissions.open = False

    def _admit(
        self,
        plan: PlanBuilder,
        request: Request,
        now_s: float,
        admissions: _Admissions,
    ) -> Row | None:
        """The first row of a waiting request; None if it has to wait."""
        residents, shape = self._residents, self._shape
        limit = self._config.skip_limit
        if any(r.skipped >= limit for r in admissions.blocked):
            admissions.open = False
            return None
        keys = self._keys[request.index]
        residents.keys(request, self.weight_version, keys)
        # A fully cached context still computes its last token, to sample from.
        usable = keys[: (request.num_tokens - 1) // shape.block_size]
        hits = residents.index.match(usable)
        if len(hits) < len(usable) and residents.produced_soon(usable[len(hits)]):
            return None  # another computes its next block: wait, then share it
        if not plan.can_adopt(len(hits)):
            return None
        residents.index.pin(hits)
        victims = self._room_for(request, len(hits))
        if victims is None:
            residents.index.unpin(hits)
            if residents.slot_free:
                admissions.blocked.append(request)
            else:
                admissions.open = False
            return None
        for victim in victims:
            self._preempt(plan, victim, now_s)
            admissions.open = False
        for passed in admissions.blocked:
            passed.skipped += 1
        running = residents.take(plan, request, keys, hits)
        del self._keys[request.index]
        self._ranking.touch(request)
        self._count_admission(request, running, now_s)
        return self._place(plan, running)

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

    def _count_admission(
        self, request: Request, running: Running, now_s: float
    ) -> None:
        cached, first = running.planned, request.num_cached_tokens is None
        if first:
            request.num_cached_tokens = cached
            self.counters.prefix_queries_tokens += len(request.prompt)
            self.counters.prefix_hits_tokens += cached
        else:
            self.counters.resumed_hits_tokens += cached
            self.counters.recomputed_tokens += running.context - cached
        self._tell(
            "admitted",
            now_s,
            request,
            slot=running.slot,
            cached_tokens=cached,
            context_tokens=running.context,
            first=first,
        )

    # Reading --------------------------------------------------------------------------

    def observe(self, launch: Launch, output: StepOutput) -> list[Observed]:
        """Take in a launch's output, in the order of submission.

        Raises:
          RuntimeError: the device counts other free blocks than the plans do; the
            message holds the equation. The engine must stop: its guarantees no longer
            hold.
        """
        free = self._read.replay(launch.plan, output.ran)
        if free != output.num_free:
            raise RuntimeError(
                f"the device has num_free={output.num_free} blocks, but "
                f"{self._read.equation()}; block ownership is broken, stop the engine"
            )
        sampled = output.ran.sum(axis=0).tolist()
        observed = []
        for i, row in enumerate(launch.rows):
            running, request, n = row.running, row.running.request, sampled[i]
            self._unread[request.index] -= 1
            if not self._unread[request.index]:
                del self._unread[request.index]
            running.sampling -= row.steps
            running.pending -= row.new_rows
            running.rows += row.prompt_tokens
            running.rows += max(n - 1, 0) if row.prompt_tokens else n
            if request.finish_reason is not None:
                self.counters.dropped_tokens += n
                continue
            first = len(request.output)
            request.output += output.tokens[:n, i].tolist()
            if n and request.params.logprobs is not None:
                request.logprobs += _logprobs(output, i, n, request.params.logprobs)
            if not running.released:
                self._residents.resize(running, running.rows + running.pending)
            observed.append(
                Observed(
                    request,
                    running.slot,
                    row.prompt_tokens,
                    first,
                    bool(output.done[i]),
                )
            )
        return observed


def _logprobs(output: StepOutput, row: int, n: int, width: int) -> list[TokenLogprobs]:
    assert output.logprobs is not None and output.ranks is not None
    assert output.top_ids is not None and output.top_logprobs is not None
    return [
        TokenLogprobs(
            float(output.logprobs[i, row]),
            int(output.ranks[i, row]),
            output.top_ids[i, row, :width].tolist(),
            output.top_logprobs[i, row, :width].tolist(),
        )
        for i in range(n)
    ]
