"""KV blocks between a JAX device and host memory, beside the launches.

Owns what is under way, and the one thread that copies: payloads leave and come in the
order in which they were asked for, while launches run, and each copy is timed. Never
decides anything, and never sees a request.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxserve.config import EngineShape, bucket
from jaxserve.device.state import EngineState
from jaxserve.device.step import num_compiled
from jaxserve.device.transfer import compiled
from jaxserve.kv_tiers.host_pool import HostPool
from jaxserve.models.base import Model
from jaxserve.moves import Moves, Restore, Transferred

Blocks = dict[str, jax.Array]
"""Contents of blocks on the device, [fold, E, ...] for each group of pages."""


class Transfers:
    """Spills, fetches and restores of one executor."""

    def __init__(self, model: Model, shape: EngineShape):
        self._shape = shape
        self._sizes = shape.transfer_buckets
        self._spill, self._restore = compiled(model, shape)
        self._programs_before = self._programs
        self._pages = model.page_shapes(shape.num_blocks, shape.block_size)
        self._host = HostPool()
        self._copier: ThreadPoolExecutor | None = None
        # Payloads on their way to the device or there, as one program takes them.
        self._staged: dict[tuple[int, ...], Future[Blocks]] = {}
        self._coming: list[tuple[int, ...]] = []  # of those, not told as arrived
        self._stage_s: dict[tuple[int, ...], float] = {}  # the copying thread's
        self._timed: deque[Transferred] = deque()
        self._last: Future | None = None  # raises what went wrong in the thread

    @property
    def _programs(self) -> int:
        return num_compiled(self._spill) + num_compiled(self._restore)

    @property
    def compiles(self) -> int:
        """Programs compiled since this was made."""
        return self._programs - self._programs_before

    @property
    def num_held(self) -> int:
        """Payloads on the host, all copies being done."""
        self._do(lambda: None).result()
        return len(self._host)

    def _do(self, work: Any, *args: Any) -> Future:
        """Have the copying thread do something after all that it was given before."""
        if self._copier is None:
            self._copier = ThreadPoolExecutor(1, "jaxserve-transfers")
        if self._last is not None and self._last.done():
            self._last.result()  # raises what went wrong there
        self._last = self._copier.submit(work, *args)
        return self._last

    def _parts(self, names: Sequence[Any]) -> Iterator[Sequence[Any]]:
        """In pieces that one program takes."""
        for start in range(0, len(names), self._sizes[-1]):
            yield names[start : start + self._sizes[-1]]

    # Out ------------------------------------------------------------------------------

    def leave(self, state: EngineState, moves: Moves) -> None:
        """Start to copy what a launch spills; it is dispatched afterwards."""
        shape = self._shape
        for spills in self._parts(moves.spill):
            size = bucket(len(spills), self._sizes)
            padding = (shape.max_slots, shape.max_blocks_per_slot, shape.num_handles)
            where = np.array([padding] * size, np.int32)
            where[: len(spills)] = [spill[1:] for spill in spills]
            # Ready when the launches before are, and not donated.
            before = state.pool.num_free + 0
            blocks = self._spill(state, where)
            for array in blocks.values():
                array.copy_to_host_async()
            self._do(self._keep, [spill.name for spill in spills], before, blocks)

    def _keep(self, names: list[int], before: jax.Array, blocks: Blocks) -> None:
        jax.block_until_ready(before)
        start_s = time.perf_counter()
        self._host.put(names, jax.device_get(blocks))
        seconds = time.perf_counter() - start_s
        self._timed.append(Transferred("out", tuple(names), seconds, 0.0))

    # Back -----------------------------------------------------------------------------

    def settle(self, state: EngineState, moves: Moves) -> EngineState:
        """What follows a launch: restores, fetches, drops. Donates the state."""
        for order in moves.restore:
            state = self._give_back(state, order)
        for names in self._parts(moves.fetch):
            self._staged[tuple(names)] = self._do(self._stage, tuple(names))
            self._coming.append(tuple(names))
        if moves.drop:
            self._do(self._forget, moves.drop)
            gone = set(moves.drop)
            # Whoever shares some of them fetches, or has fetched, its own.
            for names in [n for n in self._staged if not gone.isdisjoint(n)]:
                del self._staged[names]
            self._coming = [names for names in self._coming if names in self._staged]
        return state

    def _stage(self, names: tuple[int, ...]) -> Blocks:
        """Copy payloads to the device."""
        start_s = time.perf_counter()
        size = bucket(len(names), self._sizes)
        blocks = jax.device_put(dict(self._host.get(names, size)))
        jax.block_until_ready(blocks)
        self._stage_s[names] = time.perf_counter() - start_s
        return blocks

    def _give_back(self, state: EngineState, order: Restore) -> EngineState:
        first = order.first
        # One piece at least, for the length, though every column may be there.
        for names in self._parts(order.names) if order.names else [()]:
            staged = self._staged.get(tuple(names))
            if not names:
                blocks = self._nothing(self._sizes[0])
            elif staged is None:  # fetched in other pieces than it is restored in
                blocks = self._do(self._stage, tuple(names)).result()
            else:
                blocks = staged.result()
            what = (order.slot, first, len(names), order.length, order.last)
            before = state.pool.num_free + 0
            state = self._restore(state, np.array(what, np.int32), blocks)
            if names:
                after = state.pool.num_free + 0
                self._do(self._time_restore, tuple(names), before, after)
            first += len(names)
        return state

    def _time_restore(
        self, names: tuple[int, ...], before: jax.Array, after: jax.Array
    ) -> None:
        jax.block_until_ready(before)
        start_s = time.perf_counter()
        jax.block_until_ready(after)
        seconds = self._stage_s.pop(names) + time.perf_counter() - start_s
        self._timed.append(Transferred("in", names, seconds, 0.0))

    def _nothing(self, size: int) -> Blocks:
        """Blocks that do not count, on the device as those that were fetched."""
        blocks = self._shape.num_blocks
        return jax.device_put(
            {
                group: np.zeros(
                    (pages.shape[0] // blocks, size, *pages.shape[1:]), pages.dtype
                )
                for group, pages in self._pages.items()
            }
        )

    def _forget(self, names: Sequence[int]) -> None:
        self._host.drop(names)
        gone = set(names)
        for staged in [n for n in self._stage_s if not gone.isdisjoint(n)]:
            del self._stage_s[staged]

    def arrivals(self) -> list[int]:
        """Payloads fetched that have reached the device since the last call."""
        there = [names for names in self._coming if self._staged[names].done()]
        self._coming = [names for names in self._coming if names not in there]
        return [name for names in there for name in names]

    def await_arrival(self, most_s: float) -> None:
        """Wait for a payload that was fetched, but no longer than so many seconds."""
        end_s = time.perf_counter() + most_s
        while not any(self._staged[names].done() for names in self._coming):
            if time.perf_counter() >= end_s:
                return
            time.sleep(0.0002)  # a block or two

    def timed(self) -> list[Transferred]:
        """Copies that have ended since the last call."""
        return [self._timed.popleft() for _ in range(len(self._timed))]

    def warm_up(self, state: EngineState) -> EngineState:
        """Compile every program by moving nothing."""
        shape = self._shape
        nowhere = (shape.max_slots, shape.max_blocks_per_slot, shape.num_handles)
        for size in self._sizes:
            self._spill(state, np.array([nowhere] * size, np.int32))
            order = np.array((shape.max_slots, 0, 0, 0, 0), np.int32)
            state = self._restore(state, order, self._nothing(size))
        return state
