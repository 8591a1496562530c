"""Serves a case on the simulated executor, and keeps what the plans were made from.

Owns the record of one run. Never judges a schedule, but for the blocks and for a run
that does not end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxserve.config import EngineShape
from jaxserve.core import Event, StepOutput, StepPlan
from jaxserve.engine import Engine
from jaxserve.executors.cost_model import LinearCost
from jaxserve.executors.sim_executor import SimExecutor, Truth
from jaxserve.moves import STILL, Moves
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.policies import Policy, View
from jaxserve.simulation import NoModel
from jaxserve.testing.cases import Case
from jaxserve.testing.watch import Rank, Watch

COST = LinearCost(fixed_s=0.0101, token_s=0.00103, context_token_s=0.0000107)


class Planned(NamedTuple):
    """A launch that was submitted, and what it was planned from."""

    plan: StepPlan
    who: tuple[int, ...]  # submission index of each row's request
    in_flight: frozenset[int]  # with launches not read when this one was planned
    possible: int  # blocks free or cached for nobody, after it
    running: int  # requests with a slot, after it
    ranks: Mapping[int, Rank]  # of every live request
    views: Mapping[int, View]  # before it; empty if nothing happened since the last


class Revealed(NamedTuple):
    """How much of the truth was known at some moment."""

    launches: int  # submitted so far
    tokens: int  # most output tokens that any request has shown


class Run(NamedTuple):
    """What a run left behind.

    Attributes:
      events: in order, each with the number of launches submitted when it was told.
      outputs: tokens and finish reason by submission index.
    """

    events: list[tuple[int, Event]]
    outputs: dict[int, tuple[list[int], str | None]]
    plans: list[Planned]
    revealed: list[Revealed]


class _Tape(SimExecutor):
    """A simulated executor that keeps what it was given."""

    engine: Engine

    def __init__(
        self,
        shape: EngineShape,
        truth: Mapping[int, Truth],
        watch: Watch | None,
        case: Case,
        jump: bool,
    ):
        super().__init__(shape, truth, COST, jump=jump)
        self.plans: list[Planned] = []
        self.revealed: list[Revealed] = []
        self._watch = watch
        self._case = case
        self._unread: list[Sequence[int]] = []
        self._shown: dict[int, int] = {}

    def submit(self, plan: StepPlan, who: Sequence[int], moves: Moves = STILL):
        most = 100 + 4 * self._case.tokens
        if len(self.plans) >= most:
            self._case.fail(
                "progress",
                f"{most} launches have not served {len(self._case.requests)} requests "
                f"of {self._case.tokens} tokens: requests displace one another and "
                "get nowhere",
            )
        ranks, views, possible, running = {}, {}, 0, 0
        if self._watch:
            ranks, views = self._watch.settle()
            stats = self.engine.stats()
            possible = int(stats["free_blocks"] + stats["idle_cached_blocks"])
            running = int(stats["running"])
        in_flight = frozenset(i for rows in self._unread for i in rows)
        made = Planned(plan, tuple(who), in_flight, possible, running, ranks, views)
        self.plans.append(made)
        self._unread.append(who)
        return super().submit(plan, who, moves)

    def result(self, ticket) -> StepOutput:
        output = super().result(ticket)
        sampled = output.ran.sum(axis=0).tolist()
        for index, tokens in zip(self._unread.pop(0), sampled, strict=False):
            self._shown[index] = self._shown.get(index, 0) + tokens
        most = max(self._shown.values(), default=0)
        self.revealed.append(Revealed(len(self.plans), most))
        return output


def serve(
    policy: Policy, case: Case, *, watch: Watch | None = None, jump: bool = False
) -> Run:
    """Serve the case to its end, in logical time.

    Args:
      watch: looks at every call of the policy, which is then the watch's.
      jump: skip planning where the engine may.

    Raises:
      AssertionError: the run does not end, or blocks are lost.
    """
    truth = case.truth
    tapes: list[_Tape] = []
    events: list[tuple[int, Event]] = []

    def executor(model: object, params: object, shape: EngineShape) -> _Tape:
        tapes.append(_Tape(shape, truth, watch, case, jump))
        return tapes[0]

    engine = Engine(
        NoModel(),
        None,
        case.config,
        watch.policy if watch else policy,
        executor=executor,
        on_event=lambda event: events.append((len(tapes[0].plans), event)),
    )
    tapes[0].engine = engine
    if watch:
        watch.clock = engine.now
    for i, asked in enumerate(case.requests):
        engine.add_request(
            str(i),
            asked.prompt,
            SamplingParams(max_tokens=asked.max_tokens, output_kind="final_only"),
            arrival_time=asked.arrival_s,
            priority=asked.priority,
            user=asked.user,
            deadline_s=asked.deadline_s,
            tags=asked.tags,
            cache_salt=asked.salt,
            prompt=asked.text,
        )
    outputs = _drive(engine, case)
    _check_blocks(engine, case)
    return Run(events, outputs, tapes[0].plans, tapes[0].revealed)


def _drive(engine: Engine, case: Case) -> dict[int, tuple[list[int], str | None]]:
    outputs: dict[int, tuple[list[int], str | None]] = {}
    steps = 0
    while engine.has_unfinished_requests():
        for i, asked in enumerate(case.requests):
            if asked.abort_after == steps:
                engine.abort_request(str(i))
        try:
            ended = engine.step()
        except RuntimeError as error:
            cause = error.__cause__
            if isinstance(cause, AssertionError):
                raise cause from None
            blocks = "block ownership" in str(error)
            rule = "conservation of blocks" if blocks else "progress"
            case.fail(rule, f"the engine gives up: {error}", error)
        for output in ended:
            completion = output.outputs[0]
            outputs[int(output.request_id)] = (
                completion.token_ids,
                completion.finish_reason,
            )
        steps += 1
    return outputs


def _check_blocks(engine: Engine, case: Case) -> None:
    rule, total = "conservation of blocks", case.config.num_blocks
    if not engine.holds_nothing():
        case.fail(rule, "the idle engine still holds something of a request")
    stats = engine.stats()
    free, cached = stats["free_blocks"], stats["cached_blocks"]
    if free + cached != total:
        case.fail(rule, f"idle: {free} free + {cached} cached of {total} blocks")
    engine.reset_prefix_cache()
    free = engine.stats()["free_blocks"]
    if free != total:
        case.fail(rule, f"after reset_prefix_cache {free} of {total} blocks are free")
