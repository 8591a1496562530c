"""Plans launches and reads their outputs. Policy-free, device-free.

Owns the requests that wait and run. Names and counts only: it never sees a physical
block, a device array or a clock (the time is an argument). What ranks requests is the
policy's, what fits is the budget's, and what gives way the planner's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxserve.block_count import BlockCount
from jaxserve.config import EngineConfig, EngineShape
from jaxserve.core import (
    Event,
    Request,
    Scores,
    StepOutput,
    StepPlan,
    TokenLogprobs,
)
from jaxserve.moves import Arrived, Label, Transferred
from jaxserve.scheduling.decisions import Decisions
from jaxserve.scheduling.horizon import NOTHING, Horizon, horizon
from jaxserve.scheduling.incoming import Incoming
from jaxserve.scheduling.payloads import Payloads
from jaxserve.scheduling.plan_builder import PlanBuilder
from jaxserve.scheduling.planner import Books, Counters, Planner
from jaxserve.scheduling.policies import Policy, View
from jaxserve.scheduling.prefix_index import PrefixIndex
from jaxserve.scheduling.ranking import Ranking
from jaxserve.scheduling.residents import Residents
from jaxserve.scheduling.running import Launch, Row, Running
from jaxserve.scheduling.static_batch import StaticBatches
from jaxserve.scheduling.swap_space import SwapSpace
from jaxserve.scheduling.tiers import Tiers


class Observed(NamedTuple):
    """What reading one launch told of one request."""

    running: Running
    prompt_tokens: int  # computed by the launch
    first_output: int  # where its new output tokens start
    stopped: bool  # its last token is a stop id
    sampled: int  # output tokens, the first steps of the launch
    steps: int  # of the launch


class Scheduler:
    """Continuous batching under a policy.

    Args:
      config, shape: of the engine.
      policy: orders the requests.
      swap_blocks: blocks of host memory for preempted requests and cached blocks.
      disk_blocks: the same on disk.
      stored: what is on disk already, the longest unused first.
    """

    def __init__(
        self,
        config: EngineConfig,
        shape: EngineShape,
        policy: Policy,
        swap_blocks: int = 0,
        disk_blocks: int = 0,
        stored: Sequence[Label] = (),
    ):
        self._config = config
        self._shape = shape
        self._books = Books(Decisions(config.preemption_mode, shape.block_size))
        index = PrefixIndex(shape.num_handles)
        # The window takes the longest request whole.
        window = shape.max_blocks_per_slot if disk_blocks else 0
        caching = config.enable_prefix_caching
        self._tiers = Tiers(
            Payloads(swap_blocks, window),
            disk_blocks,
            write=config.tier_write if caching else "never",
            eviction=config.tier_eviction,
            compute_s=self._books.decisions.compute_s,
            on_device=index.holds,
            stored=stored,
        )
        self._swaps = SwapSpace(self._tiers)
        self._incoming = Incoming(self._tiers, config.transfer_timeout_s)
        self._residents = Residents(shape, index, self._swaps, caching=caching)
        self._ranking = Ranking(policy, self._view)
        # By submission index, of those with launches in flight: how many, and how many
        # tokens these may sample.
        self._unread: dict[int, int] = {}
        self._sampling: dict[int, int] = {}
        self._ended: list[Running] = []  # finished, slot not yet given back
        self._leaving: set[int] = set()  # slot given back, last output not yet read
        self._read = BlockCount(shape)  # exact, after the last launch read
        self.admits = True  # whether plans take in waiting requests
        self.vacates = False  # whether they evict every cached block
        self._evicting = False  # whether the next plan takes everybody off
        self._static = (
            StaticBatches(shape, self._residents, self._ranking)
            if config.batching == "static"
            else None
        )

    @property
    def counters(self) -> Counters:
        """Totals since the scheduler was made."""
        return self._books.counters

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
    def fragmentation(self) -> float:
        """Share of the rows in running requests' blocks that hold no token yet, after
        every launch planned, at most."""
        lengths = self._residents.budget.count.length
        held = sum(map(self._shape.blocks, lengths)) * self._shape.block_size
        return 1.0 - sum(lengths) / held if held else 0.0

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
    def holds_no_block(self) -> bool:
        """Whether no block of the device is in use or cached, after every launch."""
        return not (self._residents.running or self._residents.index.live)

    @property
    def below(self) -> dict[str, int]:
        """Gauges and totals of the tiers below the device."""
        tiers, payloads = self._tiers, self._tiers.payloads
        return {
            "host_blocks": payloads.used("pool"),
            "host_cached_blocks": len(tiers.host),
            "disk_blocks": tiers.disk_used,
            "swapped_blocks": self._swaps.used,
            "lost_swaps": self._swaps.lost,
            "timed_out_loads": self._incoming.timeouts,
            **dataclasses.asdict(tiers.counters),
        }

    def moved(self, block_bytes: int) -> dict[str, float]:
        """Totals of copies and of preemptions; see `Decisions.totals`."""
        return self._books.decisions.totals(block_bytes)

    @property
    def under_way(self) -> int:
        """Blocks on their way to disk or from it."""
        return self._tiers.under_way

    def save_cached(self) -> None:
        """Have the next plans write to disk what is cached above it."""
        self._tiers.save_all(self._residents.index.labels())

    @property
    def waits_until_s(self) -> float | None:
        """When a plan is due at the latest, since requests wait for what is on its way
        between the tiers; None if none does."""
        due_s = self._incoming.next_timeout_s
        return due_s if due_s < math.inf or self._tiers.under_way else None

    def arrived(self, arrived: Arrived) -> None:
        """Take in what has been fetched, loaded and saved."""
        self._tiers.arrived(arrived)
        self._incoming.arrived(arrived)

    @property
    def has_requests(self) -> bool:
        """Whether any request is waiting or running."""
        return len(self._ranking) > 0

    @property
    def has_chores(self) -> bool:
        """Whether a plan would give something back though no request is left."""
        forgotten = self._residents.index.has_forgotten
        below = self._tiers.has_chores or self._incoming.has_cancelled
        return bool(self._ended) or forgotten or below

    def holds_nothing(self) -> bool:
        """Whether no map has an entry left of any request."""
        return not (
            not self._residents.holds_nothing
            or len(self._ranking)
            or self._books.keys
            or self._unread
            or self._ended
            or self._leaving
            or not self._swaps.holds_nothing()
            or not self._incoming.holds_nothing()
            or not self._tiers.holds_nothing()
            or not self._books.decisions.holds_nothing()
        )

    def _view(self, request: Request) -> View:
        running = self._residents.running.get(request.index)
        ended = request.finish_reason is not None
        in_flight = 0 if ended else self._sampling.get(request.index, 0)
        return View(
            index=request.index,
            arrival_s=request.arrival_s,
            prompt_tokens=len(request.prompt),
            output_tokens=len(request.output) + in_flight,
            max_output_tokens=request.max_output_tokens,
            cached_tokens=self._cached_tokens(request),
            running=running is not None,
            preemptions=request.preemptions,
            priority=request.priority,
            user=request.user,
            deadline_s=request.deadline_s,
            tags=request.tags,
            text=request.text,
        )

    def _cached_tokens(self, request: Request) -> int:
        running = self._residents.running.get(request.index)
        if running:
            return running.cached
        swapped = self._swaps.waiting.get(request.index)
        if swapped:
            return swapped.stay.known_rows
        keys = self._books.keys.get(request.index)
        if keys is None:  # it has ended, or is about to
            return request.num_cached_tokens or 0
        usable, hits = self._residents.match(request, keys)
        below = self._tiers.find(keys[len(hits) : usable])
        return (len(hits) + len(below)) * self._shape.block_size

    # Requests come and go -------------------------------------------------------------

    def add(self, request: Request) -> None:
        """A request arrived; it may be in the next plan."""
        self._ranking.add(request)
        self._books.keys[request.index] = []

    def end(self, request: Request) -> None:
        """The request ended: finished, stopped by its text, or aborted.

        Its slot is given back by the next plan; what launches in flight still sample
        for it is dropped.
        """
        running = self._residents.running.get(request.index)
        self._ranking.remove(request)
        self.leave_family(request)
        self._books.keys.pop(request.index, None)
        self._incoming.drop(request.index)
        self._swaps.drop(request.index)
        self._books.decisions.forget(request.index)
        self._leaving.discard(request.index)
        if running:
            self._ended.append(running)

    def leave_family(self, request: Request) -> None:
        """The request ended, perhaps before it arrived."""
        self._residents.leave_family(request)

    @property
    def listens(self) -> bool:
        """Whether the policy takes in events."""
        return self._ranking.listens

    @property
    def holds_answers(self) -> bool:
        """Whether complete answers wait for the rest of their batch."""
        return self._static is not None

    def resident(self, request: Request) -> Running | None:
        """The request's stay in a slot, if it has one, or has an answer held."""
        held = self._static.stay(request) if self._static else None
        return held or self._residents.running.get(request.index)

    def hold(self, request: Request) -> None:
        """The request's answer is complete; `answered` returns it when it is time."""
        assert self._static
        self._static.hold(request)

    def answered(self) -> list[Running]:
        """Requests whose answers were held and may be given now."""
        return self._static.answered() if self._static else []

    def note(self, event: Event) -> None:
        """Show the policy an event about a request."""
        self._ranking.note(event)

    @property
    def policy(self) -> Policy:
        """What orders the requests."""
        return self._ranking.policy

    def take_over(self, policy: Policy) -> None:
        """Another policy orders the requests from now on."""
        self._ranking.take_over(policy, self._residents.running)

    def settle(self, now_s: float) -> None:
        """Let the policy hear of the last ends, for no plan may follow."""
        self._ranking.refresh(now_s)

    def take_events(self) -> list[Event]:
        """Admissions and preemptions since the last call."""
        events, self._books.events = self._books.events, []
        return events

    def reset_prefix_cache(self) -> None:
        """Forget every cached block in every tier; running requests keep what they
        use."""
        self._residents.index.reset()
        self._tiers.clear()

    @property
    def weight_version(self) -> int:
        """Of the weights that requests are computed with."""
        return self._residents.weight_version

    def set_weight_version(self, version: int, *, recompute: bool) -> None:
        """The weights have changed: what was computed with others is not found again.

        Swapped requests are computed again.

        Args:
          recompute: running ones too; else they go on, and name nothing any more.
        """
        self.reset_prefix_cache()
        self._residents.weight_version = version
        self._evicting = recompute
        for index in list(self._swaps.waiting):
            self._incoming.drop(index)
            self._swaps.drop(index)
            self._books.decisions.forget(index)
        for index in self._books.keys:
            self._incoming.drop(index)
            self._books.keys[index] = []

    def take_off(self) -> None:
        """Have the next plan preempt every running request."""
        self._evicting = True

    # Planning -------------------------------------------------------------------------

    def plan(self, now_s: float) -> Launch | None:
        """The next launch, from all that was observed; None if nothing is to do."""
        residents = self._residents
        plan = PlanBuilder(self._shape, self._config.max_num_batched_tokens)
        residents.begin_plan()
        self._tiers.write_through(plan, residents.index.find)
        if self._static is None or self._static.over:
            self._give_back(plan)
        for running in residents.running.values():
            residents.name_known(plan, running)
        residents.flush(plan)
        self._incoming.advance(plan, now_s)
        self._ranking.refresh(now_s)
        planner = Planner(
            self._config,
            self._shape,
            residents,
            self._swaps,
            self._incoming,
            self._ranking,
            self._books,
            plan,
            now_s,
            admitting=self.admits,
        )
        if self._evicting:
            self._evicting = False
            planner.preempt_all()
        if self.vacates:
            residents.budget.secure(plan, self._shape.num_blocks)
        if self._static:
            rows = self._static.fill(planner, plan, self._unread)
        else:
            rows = planner.fill(self._unread)
        self._incoming.flush(plan)
        self._tiers.flush(plan)
        moves, copied = plan.moves, self._tiers.payloads.take_copied()
        self._books.decisions.move(moves, copied, self._incoming.owner)
        if plan.empty:
            return None
        self.counters.spilled_blocks += len(plan.spill)
        # Stable: decode rows first, then what is to be scored.
        rows.sort(key=lambda row: (row.prompt_tokens > 0, not row.scored))
        for row in rows:
            index = row.running.request.index
            self._unread[index] = self._unread.get(index, 0) + 1
            self._sampling[index] = self._sampling.get(index, 0) + row.steps
        return Launch(plan.build(self._config.seed), tuple(rows), moves)

    def horizon(self, now_s: float) -> Horizon:
        """Launches from now that are sure to be alike, all others being read."""
        residents, ranking, static = self._residents, self._ranking, self._static
        below = self._swaps.waiting or self._tiers.has_chores or self._tiers.under_way
        forked = any(r.request.family for r in residents.running.values())
        if self._config.enable_prefix_caching or forked or self._ended or below:
            return NOTHING
        ranking.refresh(now_s)
        running = [residents.running[r.index] for r in ranking.running()]
        if static:
            running = list(residents.running.values())
        if not all(r.prefilled or r.over for r in running):
            return NOTHING
        steps = self._shape.decode_steps
        return horizon(
            [Row(r, 0, 0 if r.over else steps) for r in running],
            residents.budget,
            ranking,
            self._shape,
            may_join=static is None,
            slot_free=residents.slot_free,
        )

    def leap(self, rows: Sequence[Row], tokens: Sequence[Sequence[int]]) -> None:
        """Take in the launches that a simulation ran without planning them.

        Args:
          rows: of each of them. tokens: what each row sampled in all of them.
        """
        for row, new in zip(rows, tokens, strict=True):
            running = row.running
            running.request.output += new
            running.rows += len(new)
            self._residents.resize(running, running.planned + len(new))
            self._read.resize(running.slot, running.planned)

    def _give_back(self, plan: PlanBuilder) -> None:
        """Release who has ended, or will have for certain when the plan runs."""
        # Not in the order in which they ended, which says nothing of equals: rows of a
        # launch are listed by rank, and a jump does not keep that up to date.
        for running in sorted(self._ended, key=lambda r: r.slot):
            self._residents.release(plan, running)
        self._ended.clear()
        for running in list(self._residents.running.values()):
            if running.over:
                self._residents.release(plan, running)
                self._leaving.add(running.request.index)
                self._ranking.leave(running.request)

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
        for order in launch.moves.restore:
            self._read.resize(order.slot, order.length)
        self._tiers.payloads.came(spill.name for spill in launch.moves.spill)
        sampled = output.ran.sum(axis=0).tolist()
        tokens, done = output.tokens.T.tolist(), output.done.tolist()
        steps = max(sampled, default=0)
        observed = []
        for i, row in enumerate(launch.rows):
            running, request, n = row.running, row.running.request, sampled[i]
            if self._unread[request.index] > 1:
                self._unread[request.index] -= 1
                self._sampling[request.index] -= row.steps
            else:
                del self._unread[request.index], self._sampling[request.index]
            running.sampling -= row.steps
            running.pending -= row.new_rows
            running.rows += row.prompt_tokens
            running.rows += max(n - 1, 0) if row.prompt_tokens else n
            if row.scored and output.scores is not None:  # its forks' too
                _add_scores(request, launch.plan, i, output.scores)
            if request.finish_reason is not None or running.complete:
                self.counters.dropped_tokens += n
                continue
            first = len(request.output)
            request.output += tokens[i][:n]
            width = request.params.logprobs
            if width is not None and output.logprobs is not None:
                request.logprobs += _logprobs(output, i, n, width)
            if not running.released:
                self._residents.resize(running, running.rows + running.pending)
            observed.append(
                Observed(
                    running,
                    row.prompt_tokens,
                    first,
                    done[i],
                    n,
                    steps,
                )
            )
        return observed

    def measure(
        self,
        launch: Launch,
        output: StepOutput,
        seconds: float,
        transfers: Sequence[Transferred],
        now_s: float,
    ) -> None:
        """Take in how long a launch that was observed took, and copies that ended."""
        decisions = self._books.decisions
        decisions.transferred(transfers)
        for event in decisions.computed(launch, output, seconds, now_s):
            self._books.events.append(event)
            self._ranking.note(event)


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


def _add_scores(request: Request, plan: StepPlan, row: int, scores: Scores) -> None:
    """Take in the log-probabilities of a chunk's next tokens that are not known yet: a
    prompt that was preempted computes some of them again."""
    known, width = request.computed.prompt_logprobs, request.params.prompt_logprobs
    slot, _ = plan.decode[row]
    for i in np.flatnonzero(plan.chunk[:, 0] == slot).tolist():
        if len(known) != plan.chunk[i, 1] or len(known) + 1 >= len(request.prompt):
            continue
        known.append(
            TokenLogprobs(
                float(scores.logprobs[i]),
                int(scores.ranks[i]),
                scores.top_ids[i, :width].tolist(),
                scores.top_logprobs[i, :width].tolist(),
            )
        )
