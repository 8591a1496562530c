"""Runs plans on a JAX device: one jitted launch, state donated, results read late.

Owns the device state and the compiled programs. Never sees a request or the scheduler.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config import EngineShape
from jaxserve.core import Scores, StepOutput, StepPlan, empty_plan, pack
from jaxserve.device import processors
from jaxserve.device import state as device_state
from jaxserve.device.step import Outputs, compiled, num_compiled
from jaxserve.executors.cost_model import LogicalClock, StepCost
from jaxserve.executors.link import INSTANT, LinkCost
from jaxserve.executors.transfers import Transfers
from jaxserve.kv_tiers.block_file import layout
from jaxserve.kv_tiers.disk_store import DiskStore
from jaxserve.models.base import Model, Params, block_bytes
from jaxserve.models.mesh import beside, off_mesh
from jaxserve.moves import STILL, Arrived, Label, Moves, Transferred
from jaxserve.processors import Processors, Setup, pack_setup


class _Ticket(NamedTuple):
    outputs: Outputs  # on the device
    plan: StepPlan
    moves: Moves
    submitted_s: float


class JaxExecutor:
    """An executor on JAX's default device.

    Args:
      model: a frozen model; params: its weights, taken as they are.
      shape: static sizes.
      cost: None keeps the wall clock; a cost model keeps a `LogicalClock` instead.
      link: of copying blocks to the host and back, on that clock. disk: of writing
        them to disk and reading them.
      store: blocks on disk; None = there is none.
    """

    @off_mesh
    def __init__(
        self,
        model: Model,
        params: Params,
        shape: EngineShape,
        *,
        cost: StepCost | None = None,
        link: LinkCost = INSTANT,
        disk: LinkCost = INSTANT,
        store: DiskStore | None = None,
    ):
        self._model = model
        self._shape = shape
        self._params = params
        self._mark: bytes | None = None  # `fingerprint`, once it is known
        self._clock = LogicalClock(shape, cost, link, disk) if cost else None
        self._start_s = time.perf_counter()
        self._process = os.getpid()
        self._interrupted = threading.Event()
        self._vocab_size = model.vocab_size
        self._step = compiled(model, shape)
        self._set_up = processors.compiled(model.vocab_size, shape)
        self._compiled_before = self._programs
        self._store = store
        self.block_bytes = block_bytes(model, shape.block_size)
        self._transfers = Transfers(model, shape, store)
        self._state = beside(params, device_state.init(model, shape))
        # There when all that was submitted has run; no launch donates it.
        self._last: jax.Array = self._state.pool.num_free + 0

    def now(self) -> float:
        """Seconds since the executor was made, or logical time."""
        if self._clock:
            return self._clock.now()
        return time.perf_counter() - self._start_s

    def sleep_until(self, t_s: float) -> None:
        """Wait until `now` is t_s, or interrupted."""
        if self._clock:
            self._clock.sleep_until(t_s)
            return
        while (left_s := t_s - self.now()) > 0:
            if self._interrupted.wait(min(left_s, 60.0)):  # a lock's wait has a limit
                break
        self._interrupted.clear()

    def interrupt(self) -> None:
        """End the wait that is under way, or the next. Logical time has none."""
        self._interrupted.set()
        self._transfers.wake()

    @property
    def compiles(self) -> int:
        """Programs compiled since this executor was made."""
        return self._programs - self._compiled_before + self._transfers.compiles

    @property
    def _programs(self) -> int:
        return num_compiled(self._step) + num_compiled(self._set_up)

    @property
    def state(self) -> device_state.EngineState:
        """The device state after every launch submitted; donated by the next one."""
        return self._state

    @property
    def num_payloads(self) -> int:
        """KV blocks held in host memory."""
        return self._transfers.num_held

    def stored(self) -> Sequence[Label]:
        """What is on disk, the longest unused first."""
        return self._store.scan() if self._store else ()

    def arrived(self) -> Arrived:
        """What has been fetched, loaded and saved since the last call."""
        if self._clock:
            return self._transfers.wait(self._clock.arrived())
        return self._transfers.arrived()

    @off_mesh
    def set_params(self, params: Params) -> None:
        """Other weights, of the same structure, shapes and dtypes, from now on."""
        self._params, self._mark = params, None
        self._state = beside(params, self._state)
        if self._store is not None:
            self._store = self._transfers.renew_store(self.fingerprint())

    @off_mesh
    def release_pages(self) -> None:
        """Free the memory of the KV pages; no block is used and nothing under way."""
        jax.block_until_ready(self._last)
        for pages in self._state.pages.values():
            pages.delete()
        self._state = dataclasses.replace(self._state, pages={})

    @off_mesh
    def restore_pages(self) -> None:
        """Take it again."""
        pages = beside(self._params, device_state.init_pages(self._model, self._shape))
        self._state = dataclasses.replace(self._state, pages=pages)

    def fingerprint(self) -> bytes:
        """Of the model, its weights and the block size; reads all weights once."""
        if self._mark is None:
            self._mark = fingerprint(self._model, self._params, self._shape)
        return self._mark

    @off_mesh
    def snapshot(self) -> Mapping[str, Any]:
        """The device state with the blocks in use, and the host's payloads."""
        state = jax.device_get(dataclasses.replace(self._state, pages={}))
        used = np.flatnonzero(state.pool.refs)
        pages = {
            name: np.asarray(_by_block(array, self._shape.num_blocks)[:, used])
            for name, array in self._state.pages.items()
        }
        return {
            "state": jax.tree.leaves(state),
            "used": used,
            "pages": pages,
            "clock": self._clock,
            "transfers": self._transfers.snapshot(),
        }

    @off_mesh
    def restore(self, saved: Mapping[str, Any], time_s: float) -> None:
        """Go on from there."""
        empty = dataclasses.replace(self._state, pages={})
        structure = jax.tree.structure(empty)
        state = jax.tree.unflatten(structure, map(jnp.asarray, saved["state"]))
        pages = device_state.init_pages(self._model, self._shape)
        for name, blocks in saved["pages"].items():
            array = _by_block(pages[name], self._shape.num_blocks)
            array = array.at[:, saved["used"]].set(blocks)
            pages[name] = array.reshape(pages[name].shape)
        self._state = beside(self._params, dataclasses.replace(state, pages=pages))
        self._last = self._state.pool.num_free + 0
        self._transfers.restore(saved["transfers"])
        if self._clock and saved["clock"]:
            self._clock = saved["clock"]
        self._start_s = time.perf_counter() - time_s

    def close(self, timeout_s: float = 10.0) -> bool:
        """Finish what is under way and stop the threads; nothing may be submitted."""
        return self._transfers.close(timeout_s)

    def await_arrival(self, until_s: float) -> None:
        """Wait until there is more to tell, `now` is until_s, or interrupted."""
        if self._clock:
            self._clock.await_arrival(until_s)
            return
        if not self._interrupted.is_set():
            self._transfers.await_arrival(until_s - self.now())
        self._interrupted.clear()

    def timed(self) -> list[Transferred]:
        """Transfers that have ended since the last call."""
        timed = self._transfers.timed()  # on a logical clock they do not count
        return self._clock.timed() if self._clock else timed

    @off_mesh
    def submit(
        self, plan: StepPlan, who: Sequence[int], moves: Moves = STILL
    ) -> _Ticket:
        """Dispatch the launch; returns before it has run."""
        del who  # the device knows its rows by slot
        if os.getpid() != self._process:
            raise RuntimeError(
                f"the engine was made in process {self._process} and is used in "
                f"{os.getpid()}, a fork of it, where JAX's threads do not exist; make "
                "the engine in the child, or start it with multiprocessing's 'spawn'"
            )
        self._transfers.leave(self._state, moves, self._last)
        for setup in moves.setup:
            self._write_tables(setup)
        self._state, outputs = self._step(
            self._params, self._state, pack(plan), rows=plan.rows, tokens=plan.tokens
        )
        self._state, self._last = self._transfers.settle(
            self._state, moves, outputs.num_free
        )
        if self._clock:
            self._clock.submit(moves)
        return _Ticket(outputs, plan, moves, self.now())

    def _write_tables(self, setup: Setup) -> None:
        packed = pack_setup(setup, self._shape, self._vocab_size)
        tables = self._set_up(self._state.tables, packed)
        self._state = dataclasses.replace(self._state, tables=tables)

    def result(self, ticket: _Ticket) -> StepOutput:
        """Wait for the launch and bring its outputs to the host in one transfer."""
        outputs, scored = ticket.outputs, bool((ticket.plan.follow >= 0).any())
        if not scored:  # they are zeros, and not small
            outputs = outputs._replace(scores=None)
        out = jax.device_get(outputs)
        if self._clock:
            self._clock.finish(ticket.plan, out.ran, ticket.submitted_s, ticket.moves)
        return StepOutput(
            tokens=out.tokens,
            ran=out.ran,
            done=out.done,
            num_free=int(out.num_free),
            logprobs=out.logprobs,
            ranks=out.ranks,
            top_ids=out.top_ids,
            top_logprobs=out.top_logprobs,
            scores=Scores(*out.scores) if scored else None,
        )

    @off_mesh
    def warmup(
        self,
        progress: Callable[[Iterable[tuple[int, int]]], Iterable[tuple[int, int]]],
        *,
        transfers: bool = False,
    ) -> None:
        """Compile every launch shape by running a plan that does nothing in each.

        Args:
          progress: wraps the iterable of shapes, for a progress bar.
          transfers: also what copies blocks to the host and back.
        """
        self._write_tables(Setup(self._shape.max_slots, 0, (), Processors()))
        self._state = self._transfers.warm_up(self._state, tiers=transfers)
        for rows, tokens in progress(self._shape.launch_shapes()):
            plan = pack(empty_plan(self._shape, rows, tokens))
            self._state, outputs = self._step(
                self._params, self._state, plan, rows=rows, tokens=tokens
            )
            jax.block_until_ready(outputs)


def _by_block(pages: jax.Array, num_blocks: int) -> jax.Array:
    """Pages as [fold, P, ...]."""
    return pages.reshape(-1, num_blocks, *pages.shape[1:])


def open_store(
    directory: str, model: Model, params: Params, shape: EngineShape
) -> DiskStore:
    """The blocks on disk that a model with these weights can read.

    Args:
      directory: of `EngineConfig.disk_cache_dir`.
    """
    one = model.page_shapes(1, shape.block_size)
    rows = {
        # Of a pool of one block: the fold, and without the axis of blocks.
        name: ((pages.shape[0], *pages.shape[1:]), np.dtype(pages.dtype))
        for name, pages in one.items()
    }
    return DiskStore(directory, layout(rows), fingerprint(model, params, shape))


def fingerprint(model: Model, params: Params, shape: EngineShape) -> bytes:
    """16 bytes that differ for other models, weights or block sizes."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{model!r} {shape.block_size}".encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.shape} ".encode())
        digest.update(f"{array.dtype}".encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)
    return digest.digest()
