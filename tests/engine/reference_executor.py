"""The device side by its definition: plain Python, block by block, token by token.

Runs plans on the hash model as `device/step.py` must. What the device trusts the host
for is asserted here, a freed block is forgotten at once, and free blocks are handed out
in random order. Nothing compiles, so any shape is cheap.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from typing import NamedTuple

import numpy as np

from jaxserve.config import EngineShape
from jaxserve.core import ADMIT_FIELDS, Scores, StepOutput, StepPlan
from jaxserve.executors.cost_model import LinearCost, LogicalClock
from jaxserve.executors.link import INSTANT, LinkCost
from jaxserve.moves import STILL, Arrived, Label, Moves, Restore, Save, Spill, writes
from jaxserve.processors import Setup
from tests.processing import log_softmax, process
from tests.serving import draw, hash_logits


@dataclasses.dataclass
class _Slot:
    columns: list[int] = dataclasses.field(default_factory=list)  # physical blocks
    length: int = 0
    last: int = 0
    stopped: bool = True
    stop_from: int = 0
    stop_ids: tuple[int, ...] = ()
    seed: int | None = None  # None is greedy
    sample_index: int = 0
    setup: Setup | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)  # of one with a setup


class _Ticket(NamedTuple):
    output: StepOutput
    plan: StepPlan
    moves: Moves
    submitted_s: float


def _listed(edits: np.ndarray, padding: int) -> list:
    """The entries before the padding; nothing may follow it."""
    last = edits[:, -1] if edits.ndim == 2 else edits
    count = int((last < padding).sum())
    assert (last[:count] < padding).all(), "an entry follows the padding"
    return edits[:count].tolist()


def _score(context: list[int], token: int) -> tuple:
    """A token's log-probability and rank, and all ids and theirs, likeliest first."""
    logs = log_softmax(hash_logits(context))
    ids = np.argsort(-logs, kind="stable")
    return logs[token], int((logs > logs[token]).sum()) + 1, ids, logs[ids]


class ReferenceExecutor:
    """An executor on the hash model; requests are greedy or of temperature 1."""

    compiles = 0
    block_bytes = 0

    def __init__(
        self,
        shape: EngineShape,
        cost: LinearCost,
        seed: int = 0,
        link: LinkCost = INSTANT,
        disk: LinkCost = INSTANT,
        faults: float = 0.0,
    ):
        self._shape = shape
        self._clock = LogicalClock(shape, cost, link, disk)
        self._faults = faults  # share of loads and saves that fail
        self.host: dict[int, list[int | None]] = {}  # payload: a block's token ids
        self.disk: dict[bytes, tuple[Label, list[int | None]]] = {}  # files
        # The file of each load and save.
        self._under_way: dict[int, tuple[Label, list[int | None]]] = {}
        self._loads: set[int] = set()  # of these
        self._staged: dict[int, list[list[int | None]]] = {}  # by fetch
        self._rng = random.Random(seed)
        self.free = list(range(shape.num_blocks))
        self.owners = [0] * shape.num_blocks
        self.mark = 0  # of the weights, on every row that they write
        self._marks = {0}  # that rows may bear
        self.rows: dict[tuple[int, int], int] = {}  # (block, offset): token id, marked
        self.cache: dict[int, int] = {}  # handle: block
        self.slots = [_Slot() for _ in range(shape.max_slots)]

    def now(self) -> float:
        return self._clock.now()

    def sleep_until(self, t_s: float) -> None:
        self._clock.sleep_until(t_s)

    def submit(self, plan: StepPlan, who, moves: Moves = STILL) -> _Ticket:
        assert len(who) == len(_listed(plan.decode[:, 0], self._shape.max_slots))
        for spill in moves.spill:
            self._spill(spill)
        self._setups = {setup.slot: setup for setup in moves.setup}
        assert len(self._setups) == len(moves.setup)
        output = self._run(plan)
        assert not self._setups, "tables of a slot that is not taken"
        listed = set(plan.decode[: len(who), 0].tolist())
        for order in moves.restore:
            assert order.slot not in listed, "a row runs before it is restored"
            self._restore(order)
        for fetch in moves.fetch:
            assert self._loads.isdisjoint(fetch.names), "not there yet"
            self._staged[fetch.number] = [self.host[name] for name in fetch.names]
        for number in moves.cancel:
            del self._staged[number]
        for name, label in moves.load:
            assert name not in self.host, "a payload's name is used again"
            self._under_way[name] = self.disk[label.key]
            self._loads.add(name)
            held, self.host[name] = self.disk[label.key]
            assert held == label, "a file is read as another's"
        for order in writes(moves):
            key = order.label.key
            if isinstance(order, Save):
                self.disk[key] = order.label, self.host[order.name]
                self._under_way[order.name] = self.disk[key]
            else:
                self.disk.pop(key, None)
        for name in moves.drop:
            assert name not in self._under_way, "dropped while it is copied"
            del self.host[name]
        self._clock.submit(moves)
        return _Ticket(output, plan, moves, self.now())

    def result(self, ticket: _Ticket) -> StepOutput:
        output, plan, moves, submitted_s = ticket
        self._clock.finish(plan, output.ran, submitted_s, moves)
        return output

    def stored(self):
        return ()

    def interrupt(self) -> None:
        pass

    def close(self, timeout_s: float = 10.0) -> bool:
        return True

    def set_params(self, params) -> None:
        self.mark = int(params["mark"])
        self._marks.add(self.mark)
        self.disk.clear()

    def fingerprint(self) -> bytes:
        return f"{self.mark}".encode()

    def snapshot(self):
        return copy.deepcopy(vars(self))

    def restore(self, saved, time_s: float) -> None:
        vars(self).update(copy.deepcopy(saved))
        assert self.now() == time_s

    def release_pages(self) -> None:
        assert len(self.free) == self._shape.num_blocks, "a block is in use"
        assert not self.cache and not any(s.columns for s in self.slots)
        self._whole, self.free = self.free, []  # nothing can be taken

    def restore_pages(self) -> None:
        self.free = self._whole

    def arrived(self) -> Arrived:
        arrived = self._clock.arrived()
        done, failed = [], []
        for name in arrived.done:
            file = self._under_way.pop(name)
            if self._rng.random() >= self._faults:
                done.append(name)
                continue
            failed.append(name)
            key = file[0].key
            if self.disk.get(key) is file:  # not another that was written since
                del self.disk[key]
            if name in self._loads:
                del self.host[name]
        self._loads.difference_update(arrived.done)
        return arrived._replace(done=tuple(done), failed=tuple(failed))

    def timed(self):
        return self._clock.timed()

    def await_arrival(self, until_s: float) -> None:
        before = self.now()
        self._clock.await_arrival(until_s)
        assert self.now() < float("inf"), f"nothing is on its way at {before}"

    # Host -----------------------------------------------------------------------------

    def _spill(self, spill: Spill) -> None:
        name, slot, column, handle = spill
        assert name not in self.host, "a payload's name is used again"
        if slot < self._shape.max_slots:
            assert handle == self._shape.num_handles
            columns = self.slots[slot].columns
            # The host counts on the most that launches in flight may have written.
            block = columns[column] if column < len(columns) else None
        else:
            block = self.cache[handle]
        size = range(self._shape.block_size)
        self.host[name] = [self.rows.get((block, i)) for i in size]  # type: ignore[arg-type]

    def _restore(self, order: Restore) -> None:
        slot, size = self.slots[order.slot], self._shape.block_size
        assert len(slot.columns) == order.first, "columns are missing"
        assert not slot.stopped, "restores into an idle slot"
        self._grow(slot, order.length)
        staged: dict[int, list[int | None]] = {}
        if order.source is not None:
            block = self.slots[order.source].columns[order.first]
            staged[order.first] = [self.rows.get((block, i)) for i in range(size)]
        for fetch in order.fetches:
            columns = range(fetch.first, fetch.end)
            staged |= dict(zip(columns, self._staged.pop(fetch.number), strict=True))
        for column in range(order.first, self._shape.blocks(order.length)):
            block = slot.columns[column]
            for offset, token in enumerate(staged[column]):
                if column * size + offset < order.length:
                    assert token is not None, "a row is restored that nobody wrote"
                    self.rows[block, offset] = token
        slot.length, slot.last = order.length, order.last

    # Blocks ---------------------------------------------------------------------------

    def _take(self) -> int:
        assert self.free, "a slot grows with no block free"
        block = self.free.pop(self._rng.randrange(len(self.free)))
        self.owners[block] = 1
        return block

    def _drop(self, block: int) -> None:
        self.owners[block] -= 1
        assert self.owners[block] >= 0
        if not self.owners[block]:
            self.free.append(block)
            for offset in range(self._shape.block_size):
                self.rows.pop((block, offset), None)

    def _grow(self, slot: _Slot, length: int) -> None:
        while len(slot.columns) < self._shape.blocks(length):
            slot.columns.append(self._take())
        assert len(slot.columns) <= self._shape.max_blocks_per_slot

    def _write(self, slot: _Slot, position: int, token: int) -> None:
        column, offset = divmod(position, self._shape.block_size)
        block = slot.columns[column]
        assert self.owners[block] == 1, "a shared block is written"
        self.rows[block, offset] = token + self.mark

    def _context(self, slot: _Slot) -> list[int]:
        size = self._shape.block_size
        return [
            self.rows[slot.columns[i // size], i % size] for i in range(slot.length)
        ]

    def _name(self, slot: int, column: int, handle: int) -> None:
        who = self.slots[slot]
        assert handle not in self.cache, "a handle is named twice"
        assert (column + 1) * self._shape.block_size <= who.length, "named, not full"
        self.cache[handle] = who.columns[column]
        self.owners[who.columns[column]] += 1

    # A launch -------------------------------------------------------------------------

    def _edit(self, plan: StepPlan) -> list[int]:
        slots, handles = self._shape.max_slots, self._shape.num_handles
        for edit in _listed(plan.seal, handles):
            self._name(*edit)
        released = _listed(plan.release, slots)
        assert len(set(released)) == len(released)
        for slot in released:
            for block in self.slots[slot].columns:
                self._drop(block)
            self.slots[slot] = _Slot()
        retired = _listed(plan.retire, handles)
        for handle in retired:
            block = self.cache.pop(handle)
            assert self.owners[block] == 1, "a handle in use is retired"
            self._drop(block)
        for slot, column, handle in _listed(plan.adopt, handles):
            who = self.slots[slot]
            assert len(who.columns) == column and who.stopped, "adopts into a used slot"
            who.columns.append(self.cache[handle])
            self.owners[self.cache[handle]] += 1
            who.length = len(who.columns) * self._shape.block_size
        count = int((plan.admit[:, 0] < slots).sum())
        for row in plan.admit[:count].tolist():
            values = dict(zip(ADMIT_FIELDS, row, strict=False))
            who = self.slots[values["slot"]]
            assert who.stopped, "a slot in use is admitted to"
            if values["temperature"]:
                bits = np.array([values["seed_low"], values["seed_high"]], np.int32)
                who.seed = int(bits.view(np.uint64)[0])
                who.sample_index = values["sample_index"]
            who.stopped = False
            if values["processed"]:
                who.setup = self._setups.pop(values["slot"])
                who.tokens = list(who.setup.context)
            who.stop_from = values["stop_from"]
            who.stop_ids = tuple(t for t in row[len(ADMIT_FIELDS) :] if t >= 0)
        return retired

    def _sample(self, slot: _Slot) -> int:
        context = self._context(slot)
        barred = slot.stop_ids if slot.length < slot.stop_from else ()
        logits = hash_logits(context)
        if slot.setup is None:
            logits = process(logits, (), (), barred=barred)
        else:
            _, start, _, made = slot.setup
            assert len(slot.tokens) == slot.length, "the context is another's"
            marks = {c - t for c, t in zip(context, slot.tokens, strict=True)}
            assert marks <= self._marks, "the context is another's"
            may = np.unpackbits(np.frombuffer(made.mask, np.uint8), bitorder="little")
            logits = process(
                logits,
                slot.tokens[:start],
                slot.tokens[start:],
                penalties=made[:3],
                bias=dict(made.logit_bias),
                allowed=np.flatnonzero(may).tolist() if made.mask else None,
                bad_words=made.bad_words,
                barred=barred,
            )
        token = draw(logits, slot.seed, len(context), slot.sample_index)
        slot.tokens.append(token)
        slot.last = token
        slot.stopped = token in slot.stop_ids
        return token

    def _run(self, plan: StepPlan) -> StepOutput:
        shape = self._shape
        retired = self._edit(plan)
        assert (plan.rows, plan.tokens) in shape.launch_shapes()
        decode = _listed(plan.decode[:, 0], shape.max_slots)
        count = len(decode)
        assert len(set(decode)) == count, "a slot is listed twice"
        assert (plan.decode[count:, 1] == 0).all() and (
            plan.chunk_end[count:] == 0
        ).all()
        num_decode = int((plan.chunk_end[:count] == 0).sum())
        assert (plan.chunk_end[:num_decode] == 0).all(), "decode rows come first"
        chunk = plan.chunk[: int((plan.chunk[:, 0] < shape.max_slots).sum())].tolist()
        assert num_decode + len(chunk) <= plan.tokens
        tokens = np.zeros((shape.decode_steps, plan.rows), np.int32)
        ran = np.zeros((shape.decode_steps, plan.rows), bool)
        done = np.zeros(plan.rows, bool)
        allowed = plan.decode[:, 1].tolist()
        at, scored = 0, []
        follow = plan.follow.tolist()
        assert (plan.follow[count:] < 0).all()
        for row, index in enumerate(decode):
            slot, end = self.slots[index], int(plan.chunk_end[row])
            assert allowed[row] <= shape.decode_steps
            if end:
                assert end > slot.length
                self._grow(slot, end)
                for position in range(slot.length, end):
                    assert chunk[at][:2] == [index, position], "chunk out of place"
                    self._write(slot, position, chunk[at][2])
                    at += 1
                start, slot.length = slot.length, end
                if follow[row] >= 0:
                    assert len(scored) == at - (end - start), "not scored in front"
                    context = self._context(slot)
                    new = [token for _, _, token in chunk[len(scored) + 1 : at]]
                    for here, token in enumerate([*new, follow[row]], start + 1):
                        scored.append(_score(context[:here], token))
            elif allowed[row] and not slot.stopped:
                self._decode(slot)
        assert at == len(chunk), "chunk tokens of no row"
        for row, index in enumerate(decode):  # all have written before any is read
            slot = self.slots[index]
            if allowed[row] and not slot.stopped:
                tokens[0, row], ran[0, row] = self._sample(slot), True
                done[row] = slot.stopped
        for slot, column, handle in _listed(plan.publish, shape.num_handles):
            assert handle not in retired, "a retired handle is reused in its plan"
            self._name(slot, column, handle)
        for step in range(1, shape.decode_steps):
            for row, index in enumerate(decode):
                slot = self.slots[index]
                if step < allowed[row] and not slot.stopped:
                    self._decode(slot)
                    tokens[step, row], ran[step, row] = self._sample(slot), True
                    done[row] = slot.stopped
        return StepOutput(
            tokens=tokens,
            ran=ran,
            done=done,
            num_free=len(self.free),
            scores=Scores(*map(np.array, zip(*scored, strict=True)))
            if scored
            else None,
        )

    def _decode(self, slot: _Slot) -> None:
        self._grow(slot, slot.length + 1)
        self._write(slot, slot.length, slot.last)
        slot.length += 1
