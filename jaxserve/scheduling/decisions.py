"""How each victim was preempted, what that was expected to cost, and what it cost.

Owns the rates of this machine, fitted to launches and transfers as they are read, and
the decisions whose outcome is open. Never sees a clock or a payload's contents.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from jaxserve.core import Event, StepOutput
from jaxserve.moves import Moves, Transferred
from jaxserve.scheduling.preemption import (
    Fit,
    Mode,
    Queues,
    Rates,
    Victim,
    Way,
    choose,
    costs_s,
    prefill_pairs,
)
from jaxserve.scheduling.running import Launch, Running


class Loss(NamedTuple):
    """What a victim holds when it is taken off.

    Attributes:
      input_tokens: of its prompt. rows: KV rows.
      blocks: that hold them. named: leading ones with a name, which stay cached.
      shared: of those, the ones that other running requests use.
      stored: of the others, the ones that are below the device too.
    """

    input_tokens: int
    rows: int
    blocks: int
    named: int
    shared: int
    stored: int = 0


@dataclasses.dataclass
class Decision:
    """One preemption whose cost is not known yet.

    Attributes:
      mode: what was chosen.
      lost: what the victim held.
      predicted_s, other_s: what it, and the best other way, would cost.
      others: requests that shared its launches when it was chosen.
      actual_s: what it has cost so far.
      stay: the request's next one, once it has a slot again.
      names: payloads that were copied for it. fetches: numbers of its own.
    """

    mode: Way
    lost: Loss
    predicted_s: float
    other_s: float
    others: int
    actual_s: float = 0.0
    stay: Running | None = None
    names: list[int] = dataclasses.field(default_factory=list)
    fetches: list[int] = dataclasses.field(default_factory=list)


class Decisions:
    """The choice between swap, disk and recompute.

    Args:
      mode: always one, or a rule.
      block_size: tokens of a block.
    """

    def __init__(self, mode: Mode, block_size: int):
        self._mode: Mode = mode
        self._size = block_size
        # Share of named blocks that are found when their request comes back: on the
        # device, or in any tier where it is computed again.
        self._survival = {"recompute": 1.0, "copied": 1.0}
        # Seconds of a launch with prompt tokens: steps, prompt tokens, tokens they
        # attend to, decode rows, KV rows those attend to.
        self._launch = Fit((5e-3, 2e-4, 1e-7, 2e-4, 1e-7))
        # Seconds of a transfer: 1, blocks.
        self._ways = {
            "out": Fit((1e-4, 1e-4)),
            "in": Fit((1e-4, 1e-4)),
            "save": Fit((1e-3, 1e-3)),
            "load": Fit((1e-3, 1e-3)),
        }
        # Seconds that a transfer has waited for others, of late. On the way down the
        # queue is known; when a victim comes back, nobody knows who will be there.
        self._wait_s = {"in": 0.0, "load": 0.0}
        # Totals by way: blocks and seconds of copies; and of the preemptions whose cost
        # is known, what was expected and what it was.
        self._moved = {way: [0, 0.0] for way in self._ways}
        self._expected = {"predicted_s": 0.0, "actual_s": 0.0}
        self._open: dict[int, Decision] = {}  # by submission index
        self._payloads: dict[int, int] = {}  # whose each one is
        self._fetches: dict[int, int] = {}  # whose each one is
        self._leaving: set[int] = set()  # payloads not on the host yet
        self._saving: set[int] = set()  # and not on disk

    def holds_nothing(self) -> bool:
        """Whether no map has an entry of a request left."""
        return not (self._open or self._payloads or self._fetches)

    def totals(self, block_bytes: int) -> dict[str, float]:
        """Bytes and seconds of copies that have ended, each way, and of preemptions
        whose cost is known what was expected and what it was."""
        moved = {}
        for way, (blocks, seconds) in self._moved.items():
            moved[f"{way}_bytes"] = blocks * block_bytes
            moved[f"{way}_s"] = seconds
        told = {f"preemption_{name}": s for name, s in self._expected.items()}
        return moved | told

    @property
    def rates(self) -> Rates:
        """What this machine takes, as far as it is known."""
        _, token_s, pair_s, _, _ = self._launch.coefficients.tolist()
        fixed, block = {}, {}
        for way, fit in self._ways.items():
            fixed[way], block[way] = fit.coefficients.tolist()
        return Rates(
            token_s,
            pair_s,
            out_s=block["out"],
            in_s=block["in"],
            transfer_s=(fixed["out"] + fixed["in"]) / 2,
            save_s=block["save"],
            load_s=block["load"],
            disk_transfer_s=(fixed["save"] + fixed["load"]) / 2,
        )

    def compute_s(self, column: int) -> float:
        """Seconds to compute the block of a column, its prefix being there."""
        _, token_s, pair_s, _, _ = self._launch.coefficients.tolist()
        start = column * self._size
        pairs = prefill_pairs(start, start + self._size)
        return self._size * token_s + pairs * pair_s

    def choose(self, index: int, lost: Loss, room: Collection[Way], others: int) -> Way:
        """How to preempt a victim; remembers what was expected.

        Args:
          room: ways for which there is room.
          others: requests that share its launches.
        """
        self.forget(index)  # what it lost before, it has not got back
        rates = self.rates
        mine = lost.named - lost.shared
        cached = lost.shared + self._survival["recompute"] * mine
        leave = 1.0 - self._survival["copied"]
        private = lost.blocks - lost.named
        victim = Victim(
            lost.input_tokens,
            lost.rows,
            kept_tokens=cached * self._size,
            blocks=private + leave * mine,
            stored=leave * lost.stored,
            others=others,
        )
        queues = Queues(
            len(self._leaving) * rates.out_s + self._wait_s["in"],
            len(self._saving) * rates.save_s + self._wait_s["load"],
        )
        way = choose(self._mode, victim, rates, queues, room)
        costs = costs_s(victim, rates, queues)
        other_s = min(cost for other, cost in costs.items() if other != way)
        self._open[index] = Decision(way, lost, costs[way], other_s, others)
        # Nobody waits for those who do not go that way.
        self._wait_s["in"] *= 7 / 8 if way == "recompute" else 1.0
        self._wait_s["load"] *= 7 / 8 if way != "disk" else 1.0
        return way

    def move(
        self,
        moves: Moves,
        copied: Iterable[tuple[int, int]],
        owner: Callable[[int], int | None],
    ) -> None:
        """Payloads leave.

        Args:
          copied: (for which request, payload) of those that are copied for one.
          owner: whose fetch a number is.
        """
        for fetch in moves.fetch:
            index = owner(fetch.number)
            if index is not None and index in self._open:
                self._fetches[fetch.number] = index
                self._open[index].fetches.append(fetch.number)
        self._leaving.update(spill.name for spill in moves.spill)
        self._saving.update(save.name for save in moves.save)
        for index, name in copied:
            if index in self._open:
                self._payloads[name] = index
                self._open[index].names.append(name)
        self._leaving.difference_update(moves.drop)
        self._saving.difference_update(moves.drop)

    def resume(self, stay: Running) -> None:
        """A preempted request has a slot again."""
        decision = self._open.get(stay.request.index)
        if decision is None:
            return
        decision.stay = stay
        lost = decision.lost
        if lost.named > lost.shared:
            kept = stay.cached // self._size - lost.shared
            share = min(max(kept / (lost.named - lost.shared), 0.0), 1.0)
            way = "recompute" if decision.mode == "recompute" else "copied"
            self._survival[way] += (share - self._survival[way]) / 8

    def forget(self, index: int) -> None:
        """A request ended, or lost what was kept for it: no outcome will be known."""
        if index in self._open:
            self._end(index)

    def _end(self, index: int) -> Decision:
        decision = self._open.pop(index)
        for name in decision.names:
            del self._payloads[name]
        for number in decision.fetches:
            self._fetches.pop(number, None)
        return decision

    # Measured -------------------------------------------------------------------------

    def transferred(self, transfers: Sequence[Transferred]) -> None:
        """Take in copies that have ended."""
        for way, names, seconds, waited_s, number in transfers:
            self._ways[way].observe((1, len(names)), max(seconds, 1e-9))
            self._moved[way][0] += len(names)
            self._moved[way][1] += seconds
            if way == "in":
                fetcher = self._fetches.get(number)
                owners = [] if fetcher is None else [fetcher] * len(names)
            else:
                owners = [self._payloads[n] for n in names if n in self._payloads]
            if way in self._wait_s:
                self._wait_s[way] += (waited_s - self._wait_s[way]) / 8
            share_s = seconds / len(names)
            for index in owners:
                self._open[index].actual_s += share_s
            for index in set(owners):
                self._open[index].actual_s += waited_s
            if way == "out":
                self._leaving.difference_update(names)
            elif way == "save":
                self._saving.difference_update(names)

    def computed(
        self, launch: Launch, output: StepOutput, seconds: float, time_s: float
    ) -> list[Event]:
        """Take in a launch that was read, its rows' progress included.

        Returns the event of each preemption whose cost is now known. A request that
        computes again has its share of the launch, by what the parts of the launch are
        expected to take.

        Args:
          seconds: that it took. time_s: when it ended.
        """
        resumed = [
            (i, row)
            for i, row in enumerate(launch.rows)
            if (decision := self._open.get(row.running.request.index))
            and decision.stay is row.running
        ]
        if any(row.prompt_tokens for row in launch.rows):
            work = _work(launch, output)
            expected_s = self._launch(work)
            self._launch.observe(work, max(seconds, 1e-9))
            for i, row in resumed:
                end = int(launch.plan.chunk_end[i])
                start = end - row.prompt_tokens
                part = (0, row.prompt_tokens, prefill_pairs(start, end), 0, 0)
                share = self._launch(part) / max(expected_s, 1e-12)
                decision = self._open[row.running.request.index]
                decision.actual_s += min(share, 1.0) * seconds
        return [
            self._close(row.running, time_s)
            for _, row in resumed
            if row.running.rows >= row.running.context
        ]

    def _close(self, stay: Running, time_s: float) -> Event:
        request = stay.request
        decision = self._end(request.index)
        self._expected["predicted_s"] += decision.predicted_s
        self._expected["actual_s"] += decision.actual_s
        data = {
            "index": request.index,
            "mode": decision.mode,
            "predicted_s": decision.predicted_s,
            "other_s": decision.other_s,
            "others": decision.others,
            "actual_s": decision.actual_s,
        }
        return Event("resumed", time_s, request.request_id, data)


def _work(launch: Launch, output: StepOutput) -> tuple[float, ...]:
    """What a launch computed, as far as its time depends on it; rows are up to date."""
    plan, sampled = launch.plan, output.ran.sum(axis=0).tolist()
    tokens = rows = 0
    pairs = context = 0.0
    for i, row in enumerate(launch.rows):
        end, decodes = row.running.rows, sampled[i]
        if row.prompt_tokens:
            stop = int(plan.chunk_end[i])
            tokens += row.prompt_tokens
            pairs += prefill_pairs(stop - row.prompt_tokens, stop)
            decodes = max(decodes - 1, 0)
            end = stop + decodes
        rows += decodes
        context += prefill_pairs(end - decodes, end)
    steps = max(int(output.ran.any(axis=1).sum()), 1)
    return steps, tokens, pairs, rows, context
