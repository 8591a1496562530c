"""KV blocks between a JAX device and host memory, beside the launches.

Owns what is under way, and the one thread that copies: payloads leave and come in the
order in which they were asked for, while launches run, and each copy is timed. Never
decides anything, and never sees a request.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from jaxserve.config import EngineShape, bucket
from jaxserve.device.state import EngineState
from jaxserve.device.step import num_compiled
from jaxserve.device.transfer import compiled
from jaxserve.executors.disk import Disk
from jaxserve.executors.staging import Buffers, Staging
from jaxserve.executors.worker import Worker
from jaxserve.kv_tiers.disk_store import DiskStore
from jaxserve.kv_tiers.host_pool import HostPool
from jaxserve.models.base import Model
from jaxserve.moves import (
    Arrived,
    Erase,
    Fetch,
    Moves,
    Restore,
    Save,
    Transferred,
    writes,
)

Blocks = dict[str, jax.Array]
"""Contents of blocks on the device, [E, fold, ...] for each group of pages."""


class Transfers:
    """Spills, fetches and restores of one executor.

    Args:
      store: blocks on disk; None = there is none.
    """

    def __init__(
        self, model: Model, shape: EngineShape, store: DiskStore | None = None
    ):
        self._shape = shape
        self._sizes = shape.transfer_buckets
        self._run = compiled(model, shape)
        self._programs_before = self._programs
        self._host = HostPool()
        self._copier: Worker | None = None
        # Blocks of each fetch on their way to the device or there, in the pieces that
        # one program takes.
        self._staged: dict[int, Future[list[Blocks]]] = {}
        # The copying thread's: how long each took, and what it lies in.
        self._stage_s: dict[int, float] = {}
        self._buffers: dict[int, list[Buffers]] = {}
        pages = model.page_shapes(shape.num_blocks, shape.block_size)
        self._staging = Staging(pages, shape.num_blocks)
        self._fetched: deque[int] = deque()  # not told yet
        self._timed: deque[Transferred] = deque()
        self._wake = threading.Event()
        # A CPU copies on the cores that compute. How long the thread waits for one says
        # nothing of the copy, and is many times what a small one takes.
        self._on_cpu = jax.default_backend() == "cpu"
        self._clock = time.thread_time if self._on_cpu else time.perf_counter
        self._last: Future | None = None  # raises what went wrong in the thread
        self._disk = Disk(store, self._host, self._timed, self._wake) if store else None

    @property
    def _programs(self) -> int:
        return sum(map(num_compiled, self._run))

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
            self._copier = Worker("jaxserve-transfers")
        if self._last is not None and self._last.done():
            self._last.result()  # raises what went wrong there
        self._last = self._copier.submit(work, *args)
        return self._last

    def _parts(self, names: Sequence[Any]) -> Iterator[Sequence[Any]]:
        """In pieces that one program takes."""
        for start in range(0, len(names), self._sizes[-1]):
            yield names[start : start + self._sizes[-1]]

    # Out ------------------------------------------------------------------------------

    def leave(self, state: EngineState, moves: Moves, before: jax.Array) -> None:
        """Start to copy what a launch spills; it is dispatched afterwards.

        Args:
          before: is there when the launches before have run, and not donated.
        """
        shape = self._shape
        for spills in self._parts(moves.spill):
            size = bucket(len(spills), self._sizes)
            padding = (shape.max_slots, shape.max_blocks_per_slot, shape.num_handles)
            where = np.array([padding] * size, np.int32)
            where[: len(spills)] = [spill[1:] for spill in spills]
            blocks = self._run.spill(state, where)
            for array in blocks.values():
                array.copy_to_host_async()
            self._do(self._keep, [spill.name for spill in spills], before, blocks)

    def _keep(self, names: list[int], before: jax.Array, blocks: Blocks) -> None:
        jax.block_until_ready(before)
        start_s = self._clock()
        self._host.put(names, jax.device_get(blocks))
        seconds = self._clock() - start_s
        self._timed.append(Transferred("out", tuple(names), seconds, 0.0))

    # Back -----------------------------------------------------------------------------

    def settle(
        self, state: EngineState, moves: Moves, before: jax.Array
    ) -> tuple[EngineState, jax.Array]:
        """What follows a launch: restores, fetches, disk, drops. Donates the state.

        Args:
          before: is there when the launch has run, and not donated.

        Returns:
          The state, and what is there when the restores have run too.
        """
        for order in moves.restore:
            state, before = self._give_back(state, order, before)
        for fetch in moves.fetch:
            self._staged[fetch.number] = self._do(self._stage, fetch)
        for number in moves.cancel:
            del self._staged[number]
            self._do(self._forget_fetch, number)
        if moves.save or moves.load or moves.erase:
            self._to_disk(moves)
        if moves.drop:
            self._do(self._host.drop, moves.drop)
        return state, before

    def _to_disk(self, moves: Moves) -> None:
        if self._disk is None:
            raise ValueError(
                "num_disk_blocks has blocks written to disk, but the executor has no "
                "disk; set disk_cache_dir, or give it a DiskStore"
            )
        for save in moves.save:
            self._disk.expect(save.name)
        if moves.load:
            self._disk.load(moves.load)
        if moves.save or moves.erase:
            # Of the weights that they were computed with, whenever they are written.
            self._do(self._hand_over, writes(moves), self._disk.store)

    def _hand_over(self, orders: Sequence[Save | Erase], store: DiskStore) -> None:
        """Have payloads written, now that they are on the host."""
        assert self._disk is not None
        names = [order.name for order in orders if isinstance(order, Save)]
        payloads = {name: self._host.one(name) for name in names}
        self._disk.save(orders, payloads, store)

    def renew_store(self, fingerprint: bytes) -> DiskStore:
        """Write and read blocks of other weights from now on; those of the old ones
        are erased once all that was asked for is done."""
        assert self._disk is not None
        old, new = self._disk.renew(fingerprint)
        self._do(self._disk.forget, old)
        return new

    def _stage(self, fetch: Fetch) -> list[Blocks]:
        """Copy payloads to the device."""
        start_s = self._clock()
        buffers = []
        for names in self._parts(fetch.names):
            buffers.append(self._staging.take(bucket(len(names), self._sizes)))
            self._host.get(names, buffers[-1])
        copied_s = self._clock() - start_s
        pieces = jax.block_until_ready([jax.device_put(rows) for rows in buffers])
        seconds = self._clock() - start_s
        # On a CPU the blocks are copied once more, into the pages. When that ends shows
        # only once this thread gets a core and the interpreter, milliseconds later.
        self._stage_s[fetch.number] = seconds + copied_s * self._on_cpu
        self._buffers[fetch.number] = buffers
        self._fetched.append(fetch.number)
        self._wake.set()
        return pieces

    def _give_back(
        self, state: EngineState, order: Restore, before: jax.Array
    ) -> tuple[EngineState, jax.Array]:
        if not order.fetches:  # a copy, or nothing but its length
            copied = order.source is not None
            source = order.source if copied else self._shape.max_slots
            what = (order.slot, source, order.first, copied, order.length, order.last)
            return self._run.fork(state, np.array(what, np.int32))
        for fetch in order.fetches:
            state, before = self._give_back_part(state, order, fetch, before)
        return state, before

    def _give_back_part(
        self, state: EngineState, order: Restore, fetch: Fetch, before: jax.Array
    ) -> tuple[EngineState, jax.Array]:
        pieces = self._staged.pop(fetch.number).result()
        has, start, after = order.first, fetch.first, before
        for names, blocks in zip(self._parts(fetch.names), pieces, strict=True):
            skip = min(max(has - start, 0), len(names))
            if skip < len(names):
                what = (order.slot, start, len(names), skip, order.length, order.last)
                what = np.array(what, np.int32)
                state, after = self._run.restore(state, what, blocks)
            start += len(names)
        self._do(self._time_restore, fetch, before, after)
        return state, after

    def _time_restore(self, fetch: Fetch, before: jax.Array, after: jax.Array) -> None:
        seconds = self._stage_s.pop(fetch.number)
        if not self._on_cpu:
            jax.block_until_ready(before)
            start_s = time.perf_counter()
            jax.block_until_ready(after)
            seconds += time.perf_counter() - start_s
        for buffers in self._buffers.pop(fetch.number, []):
            self._staging.give(buffers, after)
        self._timed.append(Transferred("in", fetch.names, seconds, 0.0, fetch.number))

    def _forget_fetch(self, number: int) -> None:
        self._stage_s.pop(number, None)
        for buffers in self._buffers.pop(number, []):
            self._staging.give(buffers)

    # Reports --------------------------------------------------------------------------

    def arrived(self) -> Arrived:
        """What has been fetched, loaded and saved since the last call, and what other
        engines did to the directory."""
        self._wake.clear()  # before looking: what comes meanwhile sets it again
        fetched = [self._fetched.popleft() for _ in range(len(self._fetched))]
        if self._disk is None:
            return Arrived(fetches=tuple(fetched))
        done = self._disk.done()
        found, gone = self._disk.changes()
        return Arrived(
            tuple(fetched),
            tuple(name for name, made_it in done if made_it),
            tuple(name for name, made_it in done if not made_it),
            tuple(found),
            tuple(gone),
        )

    def wait(self, arrived: Arrived) -> Arrived:
        """What became of orders that are done on another clock."""
        if self._disk is None:
            return arrived
        done = [(name, self._disk.wait(name)) for name in arrived.done]
        return arrived._replace(
            done=tuple(name for name, made_it in done if made_it),
            failed=tuple(name for name, made_it in done if not made_it),
        )

    def await_arrival(self, most_s: float) -> None:
        """Wait until there is more to tell, but no longer than so many seconds."""
        # A timeout beyond what a lock takes is as good as none.
        self._wake.wait(min(max(most_s, 0.0), 3600.0))

    def snapshot(self) -> Mapping[str, Any]:
        """Payloads, what is staged, and what is not told yet, all copies being done."""
        self._do(lambda: None).result()
        disk = self._disk.outcomes() if self._disk else []
        staged = {
            number: jax.tree.map(np.array, job.result())  # copied: it may be a buffer
            for number, job in self._staged.items()
        }
        return {
            "payloads": self._host.all(),
            "staged": staged,
            "stage_s": dict(self._stage_s),
            "fetched": list(self._fetched),
            "timed": list(self._timed),
            "disk": disk,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._do(lambda: None).result()
        if self._disk:
            self._disk.outcomes()  # what is under way is not the snapshot's
        self._host.replace(saved["payloads"])
        self._staged = {}
        self._buffers = {}  # not taken back: launches may still read them
        for number, pieces in saved["staged"].items():
            job = self._staged[number] = Future()
            job.set_result(jax.device_put(pieces))
        self._stage_s = dict(saved["stage_s"])
        self._fetched = deque(saved["fetched"])
        self._timed.clear()
        self._timed.extend(saved["timed"])
        if self._disk:
            self._disk.tell(saved["disk"])

    def wake(self) -> None:
        """End the wait of `await_arrival`, from any thread."""
        self._wake.set()

    def close(self, timeout_s: float) -> bool:
        """Finish what is under way, and stop the threads; False if that takes longer,
        and they are left behind."""
        copier, disk = self._copier, self._disk
        self._copier = self._disk = None
        done = copier is None or copier.close(timeout_s)
        return (disk is None or disk.close(timeout_s)) and done

    def timed(self) -> list[Transferred]:
        """Copies that have ended since the last call."""
        return [self._timed.popleft() for _ in range(len(self._timed))]

    def warm_up(self, state: EngineState, *, tiers: bool) -> EngineState:
        """Compile every program by moving nothing.

        Args:
          tiers: also what copies blocks to the host and back.
        """
        shape = self._shape
        nothing = np.array((shape.max_slots, shape.max_slots, 0, 0, 0, 0), np.int32)
        state, _ = self._run.fork(state, nothing)
        if not tiers:
            return state
        nowhere = (shape.max_slots, shape.max_blocks_per_slot, shape.num_handles)
        for size in self._sizes:
            self._run.spill(state, np.array([nowhere] * size, np.int32))
            order = np.array((shape.max_slots, 0, 0, 0, 0, 0), np.int32)
            self._do(self._staging.warm_up, size)
            buffers = self._do(self._staging.take, size).result()
            state, after = self._run.restore(state, order, jax.device_put(buffers))
            self._do(self._staging.give, buffers, after)
        return state
