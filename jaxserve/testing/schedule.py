"""What a run's plans and events show of its schedule.

Owns the rules of who is admitted, passed and displaced. Never calls a policy: ranks are
those that the scheduler went by.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from jaxserve.core import Event
from jaxserve.testing.cases import TIGHT_BLOCKS, Case
from jaxserve.testing.serving import Planned, Run


class _Stay(NamedTuple):
    """An admission: what it must hold before sampling, and what it holds."""

    slot: int
    context: int
    planned: int


class _Moment(NamedTuple):
    """A plan, and how things stand after it.

    Attributes:
      admitted, displaced: by this plan, in the order of its decisions.
      waiting: live requests without a slot, first in rank first.
      stays: of the requests with a slot.
      served: requests that have been admitted, now or before.
      output: tokens of each request that had been read before it, 0 left out.
    """

    made: Planned
    admitted: list[int]
    displaced: list[int]
    waiting: list[int]
    stays: dict[int, _Stay]
    served: frozenset[int]
    output: dict[int, int]


def _moments(run: Run) -> Iterator[_Moment]:
    told = itertools.groupby(run.events, key=lambda item: item[0])
    by_plan = {number: [event for _, event in group] for number, group in told}
    stays: dict[int, _Stay] = {}
    served: set[int] = set()
    output: dict[int, int] = {}
    for number, made in enumerate(run.plans, start=1):
        events = by_plan.get(number, [])
        admitted = [e.data["index"] for e in events if e.kind == "admitted"]
        displaced = [e.data["index"] for e in events if e.kind == "preempted"]
        stays = {i: stay for i, stay in stays.items() if i in made.ranks}
        for event in events:
            _move(stays, event)
        ends = dict(zip(made.plan.decode[:, 0], made.plan.chunk_end, strict=True))
        for index, stay in stays.items():
            planned = max(stay.planned, int(ends.get(stay.slot, 0)))
            stays[index] = stay._replace(planned=planned)
        served.update(admitted)
        waiting = sorted(made.ranks.keys() - stays.keys(), key=made.ranks.__getitem__)
        yield _Moment(
            made,
            admitted,
            displaced,
            waiting,
            dict(stays),
            frozenset(served),
            dict(output),
        )
        for event in events:
            if event.kind == "progressed":
                index, new = event.data["index"], event.data["output_tokens"]
                output[index] = output.get(index, 0) + new


def _move(stays: dict[int, _Stay], event: Event) -> None:
    data = event.data
    if event.kind == "admitted":
        context, planned = data["context_tokens"], data["cached_tokens"]
        stays[data["index"]] = _Stay(data["slot"], context, planned)
    elif event.kind == "preempted":
        del stays[data["index"]]


def _shares(case: Case, index: int, moment: _Moment) -> bool:
    """Whether a block of its prompt may be in another's making, to be shared soon."""
    if not case.config.enable_prefix_caching:
        return False
    size, mine = case.config.block_size, case.requests[index]
    others = (case.requests[i] for i in moment.stays)
    return any(
        other.salt == mine.salt and other.prompt[:size] == mine.prompt[:size]
        for other in others
    )


def check_schedule(case: Case, run: Run, bounded_wait: int | None) -> None:
    """Raise AssertionError if the run breaks a rule of who goes first."""
    moments = list(_moments(run))
    for moment in moments:
        _check_rows(case, moment)
        _check_work(case, moment)
        _check_displaced(case, moment)
    _check_turns(case, moments)
    if bounded_wait is not None:
        _check_waits(case, moments, bounded_wait)


def _check_rows(case: Case, moment: _Moment) -> None:
    """Each row of a launch is of a request that holds the slot it writes to."""
    for index, slot in zip(
        moment.made.who, moment.made.plan.decode[:, 0], strict=False
    ):
        if index not in moment.made.ranks:
            continue  # it ended: a row of padding until its static batch does
        stay = moment.stays.get(index)
        if stay is None or stay.slot != slot:
            case.fail(
                "conservation of blocks",
                f"a launch computes a row of request {index} on slot {slot}, which is "
                f"not its own: it has {stay}",
            )


def _check_work(case: Case, moment: _Moment) -> None:
    """No slot idles while the first that waits surely fits.

    Surely: the whole context, beside what running requests need to finish their
    prompts, in blocks that are free or evictable, and where requests were preempted a
    block more for each that runs (docs/design.md, "No thrashing"). Not judged: static
    batches, plans that preempted, that spent their tokens or their edits, and requests
    whose prompt another may be computing.
    """
    config, made = case.config, moment.made
    slots, size = config.max_num_seqs, config.block_size
    tokens = int((made.plan.chunk[:, 0] < slots).sum())
    rows = int(((made.plan.decode[:, 0] < slots) & (made.plan.chunk_end == 0)).sum())
    if (
        config.batching == "static"
        or moment.displaced
        or made.running >= slots
        or tokens + rows >= config.max_num_batched_tokens
    ):
        return
    promised = sum(
        max(0, -(-stay.context // size) - -(-stay.planned // size))
        for stay in moment.stays.values()
    )
    edits = int((made.plan.adopt[:, 0] < slots).sum())
    views = made.views
    stay_preempted = any(i in views and views[i].preemptions for i in moment.stays)
    growth = -(-config.num_scheduler_steps // size) * len(moment.stays)
    for index in moment.waiting:
        view = views.get(index)
        if view is None or index in made.in_flight:
            continue
        need = -(-(view.prompt_tokens + view.output_tokens) // size)
        if need + edits > made.plan.adopt.shape[0]:
            return
        spare = growth if view.preemptions or stay_preempted else 0
        if need + promised + spare > made.possible:
            return  # it may be what blocks those behind it
        if _shares(case, index, moment):
            continue
        case.fail(
            "work conservation",
            f"request {index}, first in rank of those that wait, needs {need} blocks, "
            f"{made.possible} are free or evictable of which {promised} are promised, "
            f"and {made.running} of {slots} slots are taken, but it is not admitted",
        )


def _check_displaced(case: Case, moment: _Moment) -> None:
    """Whoever loses a slot to a newcomer is of larger class; memory aside."""
    ranks = moment.made.ranks
    gains = sorted(ranks[i][0] for i in moment.admitted)
    losses = sorted(ranks[i][0] for i in moment.displaced)
    if case.config.num_blocks != TIGHT_BLOCKS:
        paired = len(losses) <= len(gains) and all(
            gain < loss for gain, loss in zip(gains, losses, strict=False)
        )
    else:  # a running request that grows takes blocks from any behind it
        ahead = [ranks[i] for i in {*moment.made.who, *moment.admitted}]
        paired = all(
            any(gain < ranks[i][0] for gain in gains)
            or any(rank <= ranks[i] for rank in ahead)
            for i in moment.displaced
        )
    if not paired:
        case.fail(
            "no ping-pong",
            f"requests {moment.displaced} of classes {losses} lose their slots to "
            f"{moment.admitted} of classes {gains}; only a strictly smaller class may "
            "displace",
        )


def _check_turns(case: Case, moments: list[_Moment]) -> None:
    """Of two requests, none displaces the other in turn before either has got a token
    further, read or in flight; nobody is displaced more often than others and tokens of
    its own explain.
    """
    had: dict[tuple[int, int], list[tuple[int, int]]] = {}  # by (loser, gainer)
    times: dict[int, int] = {}
    planned: dict[int, int] = {}  # output tokens, those in flight counted
    for moment in moments:
        ranks = moment.made.ranks
        planned |= {i: view.output_tokens for i, view in moment.made.views.items()}
        pairs = [
            (loser, gainer)
            for loser in moment.displaced
            for gainer in moment.admitted
            if ranks[gainer][0] < ranks[loser][0]
        ]
        for loser, gainer in pairs:
            now = [(moment.output.get(i, 0), planned[i]) for i in (gainer, loser)]
            if had.get((gainer, loser)) == now[::-1]:
                case.fail(
                    "no ping-pong",
                    f"request {gainer}, displaced by {loser}, displaces it in turn; "
                    f"they had {now[0][0]} and {now[1][0]} output tokens both times, "
                    f"and their classes are now {ranks[gainer][0]} and "
                    f"{ranks[loser][0]}",
                )
            had[loser, gainer] = now
        for loser in moment.displaced:
            times[loser] = times.get(loser, 0) + 1
            most = len(case.requests) + len(case.requests[loser].output)
            if times[loser] > most:
                case.fail(
                    "no ping-pong",
                    f"request {loser} lost its slot {times[loser]} times, more than "
                    f"{len(case.requests)} requests and its output tokens explain",
                )


def _check_waits(case: Case, moments: list[_Moment], bounded_wait: int) -> None:
    """Nobody is passed by more later arrivals of its class than was promised."""
    most = bounded_wait + case.config.max_num_seqs - 1
    passed: dict[int, list[int]] = {}
    served: frozenset[int] = frozenset()

    def place(index: int) -> tuple[float, int]:
        return case.requests[index].arrival_s, index

    for moment in moments:
        ranks = moment.made.ranks
        newcomers = [i for i in moment.admitted if i not in served]
        served = moment.served
        for index in moment.waiting:
            if index in served or _shares(case, index, moment):
                continue
            passed.setdefault(index, []).extend(
                i
                for i in newcomers
                if place(i) > place(index) and ranks[i][0] == ranks[index][0]
            )
            if len(passed[index]) > most:
                case.fail(
                    "bounded wait",
                    f"request {index} waits while {len(passed[index])} later arrivals "
                    f"of its class are admitted, {passed[index]}; promised are "
                    f"{bounded_wait}, and {most} at most where one plan admits several",
                )
