"""How each victim was preempted, what that was expected to cost, and what it cost.

Owns the rates of this machine, fitted to launches and transfers as they are read, and
the decisions whose outcome is open. Never sees a clock or a payload's contents.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from jaxserve.core import Event, StepOutput
from jaxserve.moves import Transferred
from jaxserve.scheduling.preemption import (
    Fit,
    Mode,
    Rates,
    Victim,
    prefill_pairs,
    recompute_s,
    swap_s,
    swaps,
)
from jaxserve.scheduling.running import Launch, Running


class Loss(NamedTuple):
    """What a victim holds when it is taken off.

    Attributes:
      input_tokens: of its prompt. rows: KV rows.
      blocks: that hold them. named: leading ones with a name, which stay cached.
      shared: of those, the ones that other running requests use.
    """

    input_tokens: int
    rows: int
    blocks: int
    named: int
    shared: int


@dataclasses.dataclass
class Decision:
    """One preemption whose cost is not known yet.

    Attributes:
      mode: what was chosen.
      lost: what the victim held.
      predicted_s, other_s: what it, and the other way, would cost.
      actual_s: what it has cost so far.
      stay: the request's next one, once it has a slot again.
      names: payloads that were copied for it.
    """

    mode: Literal["recompute", "swap"]
    lost: Loss
    predicted_s: float
    other_s: float
    actual_s: float = 0.0
    stay: Running | None = None
    names: list[int] = dataclasses.field(default_factory=list)


class Decisions:
    """The choice between swap and recompute.

    Args:
      mode: always one, or a rule.
      block_size: tokens of a block.
    """

    def __init__(self, mode: Mode, block_size: int):
        self._mode: Mode = mode
        self._size = block_size
        self._survival = 1.0  # of named blocks until their request comes back
        # Seconds of a launch with prompt tokens: steps, prompt tokens, tokens they
        # attend to, decode rows, KV rows those attend to.
        self._launch = Fit((5e-3, 2e-4, 1e-7, 2e-4, 1e-7))
        # Seconds of a transfer: 1, blocks.
        self._ways = {"out": Fit((1e-4, 1e-4)), "in": Fit((1e-4, 1e-4))}
        self._open: dict[int, Decision] = {}  # by submission index
        self._payloads: dict[int, int] = {}  # whose each one is
        self._leaving: set[int] = set()  # payloads not on the host yet

    def holds_nothing(self) -> bool:
        """Whether no map has an entry left."""
        return not (self._open or self._payloads or self._leaving)

    @property
    def rates(self) -> Rates:
        """What this machine takes, as far as it is known."""
        _, token_s, pair_s, _, _ = self._launch.coefficients.tolist()
        out_fixed, out_s = self._ways["out"].coefficients.tolist()
        in_fixed, in_s = self._ways["in"].coefficients.tolist()
        return Rates(token_s, pair_s, out_s, in_s, (out_fixed + in_fixed) / 2)

    def choose(self, index: int, lost: Loss, *, room: bool) -> bool:
        """Whether to swap a victim; remembers what was expected.

        Args:
          room: whether the host has room for its blocks.
        """
        self.forget(index)  # what it lost before, it has not got back
        rates = self.rates
        kept = lost.shared + self._survival * (lost.named - lost.shared)
        victim = Victim(
            lost.input_tokens, lost.rows, kept * self._size, lost.blocks - kept
        )
        queue_s = len(self._leaving) * rates.out_s
        swap = room and swaps(self._mode, victim, rates, queue_s)
        copy_s, compute_s = swap_s(victim, rates, queue_s), recompute_s(victim, rates)
        if swap:
            self._open[index] = Decision("swap", lost, copy_s, compute_s)
        else:
            self._open[index] = Decision("recompute", lost, compute_s, copy_s)
        return swap

    def spill(self, copied: Iterable[tuple[int, int]]) -> None:
        """Payloads leave for the host, each for a request."""
        for index, name in copied:
            self._leaving.add(name)
            if index in self._open:
                self._payloads[name] = index
                self._open[index].names.append(name)

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
            self._survival += (share - self._survival) / 8

    def forget(self, index: int) -> None:
        """A request ended, or lost what was kept for it: no outcome will be known."""
        if index in self._open:
            self._end(index)

    def _end(self, index: int) -> Decision:
        decision = self._open.pop(index)
        for name in decision.names:
            del self._payloads[name]
        return decision

    def drop(self, names: Iterable[int]) -> None:
        """Payloads are not needed any more."""
        self._leaving.difference_update(names)

    # Measured -------------------------------------------------------------------------

    def transferred(self, transfers: Sequence[Transferred]) -> None:
        """Take in copies that have ended."""
        for way, names, seconds, waited_s in transfers:
            self._ways[way].observe((1, len(names)), max(seconds, 1e-9))
            share_s = seconds / len(names)
            owners = [self._payloads[name] for name in names if name in self._payloads]
            for index in owners:
                self._open[index].actual_s += share_s
            for index in set(owners):
                self._open[index].actual_s += waited_s
            if way == "out":
                self._leaving.difference_update(names)

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
        data = {
            "index": request.index,
            "mode": decision.mode,
            "predicted_s": decision.predicted_s,
            "other_s": decision.other_s,
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
