"""Collects what a plan will do, and lays it out as the padded arrays of a StepPlan.

Owns the limits of one plan (K edits of a kind, T tokens, R rows). Never decides
anything. Numpy only.
"""

from __future__ import annotations

import numpy as np

from jaxserve.config import EngineShape
from jaxserve.core import ADMIT_FIELDS, Request, StepPlan, empty_plan, random_seed
from jaxserve.moves import Erase, Fetch, Load, Moves, Restore, Save, Spill
from jaxserve.processors import Setup


class PlanBuilder:
    """Edits and rows of the plan being built, as lists."""

    def __init__(self, shape: EngineShape, token_budget: int):
        self._shape = shape
        self.tokens_left = token_budget
        self.seal: list[tuple[int, int, int]] = []
        self.release: list[int] = []
        self.retire: list[int] = []
        self.adopt: list[tuple[int, int, int]] = []
        self.publish: list[tuple[int, int, int]] = []
        self.admit: list[tuple[int, Request]] = []
        self.decode_rows: list[tuple[int, int]] = []  # slot, steps allowed
        self.chunk_rows: list[tuple[int, int, int, list[int], int]] = []
        # slot, steps allowed, first position, token ids, `StepPlan.follow`
        self.setup: list[Setup] = []
        self.spill: list[Spill] = []
        self.restore: list[Restore] = []
        self.fetch: list[Fetch] = []
        self.cancel: list[int] = []
        self.save: list[Save] = []
        self.load: list[Load] = []
        self.erase: list[Erase] = []
        self.drop: list[int] = []

    @property
    def can_retire(self) -> bool:
        """Whether another handle may be retired in this plan."""
        return len(self.retire) < self._shape.max_edits

    def can_adopt(self, columns: int) -> bool:
        """Whether `columns` more may be adopted in this plan."""
        return len(self.adopt) + columns <= self._shape.max_edits

    def can_name(self, edits: list[tuple[int, int, int]]) -> bool:
        """Whether `seal` or `publish` has room for another edit."""
        return len(edits) < self._shape.max_edits

    @property
    def empty(self) -> bool:
        """Whether the plan would do nothing."""
        rows = self.decode_rows or self.chunk_rows or self.admit
        edits = self.seal or self.release or self.retire
        up = self.fetch or self.cancel or self.load
        down = self.spill or self.save or self.erase or self.drop
        return not (rows or edits or up or down)

    @property
    def moves(self) -> Moves:
        """What crosses between device, host and disk around this launch."""
        return Moves(
            setup=tuple(self.setup),
            spill=tuple(self.spill),
            restore=tuple(self.restore),
            fetch=tuple(self.fetch),
            cancel=tuple(self.cancel),
            save=tuple(self.save),
            load=tuple(self.load),
            erase=tuple(self.erase),
            drop=tuple(self.drop),
        )

    def spill_column(self, name: int, slot: int, column: int) -> None:
        """Copy a slot's column to the host before this plan may free it."""
        self.spill.append(Spill(name, slot, column, self._shape.num_handles))

    def spill_handle(self, name: int, handle: int) -> None:
        """Copy a named block to the host before this plan may free it."""
        for slot, column, sealed in self.seal:
            if sealed == handle:  # the name is this plan's own: no launch knows it yet
                self.spill_column(name, slot, column)
                return
        shape = self._shape
        spill = Spill(name, shape.max_slots, shape.max_blocks_per_slot, handle)
        self.spill.append(spill)

    def take_slot(self, slot: int, request: Request) -> None:
        """The request gets a slot: its parameters, and its tables if it has any."""
        self.admit.append((slot, request))
        if request.processors is not None:
            context = tuple(request.tokens(0, request.num_tokens))
            prompt = len(request.prompt)
            self.setup.append(Setup(slot, prompt, context, request.processors))

    def add_decode(self, slot: int, steps: int) -> None:
        """A decode row of up to `steps` sampled tokens."""
        self.decode_rows.append((slot, steps))
        self.tokens_left -= 1

    def add_chunk(
        self, slot: int, steps: int, start: int, tokens: list[int], follow: int = -1
    ) -> None:
        """Prompt tokens at `start`; `steps` > 0 samples once they are all in.

        Args:
          follow: the token after them, if they are to be scored; else -1.
        """
        self.chunk_rows.append((slot, steps, start, tokens, follow))
        self.tokens_left -= len(tokens)

    def build(self, engine_seed: int) -> StepPlan:
        """The padded plan, in the smallest launch shape that holds it."""
        shape = self._shape
        self.chunk_rows.sort(key=lambda row: row[-1] < 0)  # stable: scored ones first
        chunk = [
            (slot, start + i, token)
            for slot, _, start, tokens, _ in self.chunk_rows
            for i, token in enumerate(tokens)
        ]
        decode = self.decode_rows + [row[:2] for row in self.chunk_rows]
        ends = [start + len(tokens) for _, _, start, tokens, _ in self.chunk_rows]
        tokens = len(self.decode_rows) + len(chunk)
        rows = max(len(decode), len(self.release), len(self.admit))
        plan = empty_plan(shape, *shape.launch_shape(rows, tokens))
        for name in ("seal", "release", "retire", "adopt", "publish"):
            edits = getattr(self, name)
            if edits:
                getattr(plan, name)[: len(edits)] = edits
        if chunk:
            plan.chunk[: len(chunk)] = chunk
        if decode:
            plan.decode[: len(decode)] = decode
        plan.chunk_end[len(self.decode_rows) : len(decode)] = ends
        plan.follow[len(self.decode_rows) : len(decode)] = [
            row[-1] for row in self.chunk_rows
        ]
        for row, (slot, request) in enumerate(self.admit):
            plan.admit[row] = _admit_row(shape, slot, request, engine_seed)
        return plan


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def _admit_row(
    shape: EngineShape, slot: int, request: Request, engine_seed: int
) -> np.ndarray:
    params = request.params
    seed = random_seed(engine_seed, request.stream, params.seed)
    values = {
        "slot": slot,
        "seed_high": seed >> 32,
        "seed_low": seed & 0xFFFFFFFF,
        "sample_index": request.sample_index,
        "temperature": _bits(0.0 if params.greedy else params.temperature),
        "top_k": min(params.top_k, 2**31 - 1),
        "top_p": _bits(params.top_p),
        "min_p": _bits(params.min_p),
        "stop_from": len(request.prompt)
        + min(params.min_tokens, request.max_output_tokens),
        "wants_logprobs": params.logprobs is not None,
        "processed": request.processors is not None,
    }
    stops = list(request.stop_ids)
    stops += [-1] * (shape.max_stop_ids - len(stops))
    row = [int(values[name]) for name in ADMIT_FIELDS] + stops
    return np.array(row, np.int64).astype(np.uint32).view(np.int32)
