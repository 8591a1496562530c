"""The engine: requests in, outputs out, one launch a step.

Owns the parts and how they are put together: who asks (`Clients`), what is planned (the
scheduler) and where it runs (the executor, through the `Loop`). Never sees a device
array or a physical block. Token ids in, token ids out; a tokenizer only adds text.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

import numpy as np

from jaxserve.answers import Answer
from jaxserve.clients import Clients
from jaxserve.config import EngineConfig, EngineShape
from jaxserve.core import Event
from jaxserve.executors.base import Executor
from jaxserve.intake import Intake
from jaxserve.live import Live
from jaxserve.loop import Loop
from jaxserve.models.base import (
    Model,
    Params,
    num_blocks,
    num_disk_blocks,
    num_swap_blocks,
)
from jaxserve.models.detokenizer import Decodes
from jaxserve.models.mesh import on_auto_axes
from jaxserve.models.replacement import replacement
from jaxserve.outputs import RequestOutput
from jaxserve.reports import Reports
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.policies import Policy, check_is_policy, fcfs
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.snapshot import Snapshot, pack, policy_names, unpack
from pallas_kernels.packed import skip_padding

Update = Literal["wait", "recompute", "keep"]
"""What becomes of requests that run when weights are replaced."""

_PATIENCE_S = 10.0
"""How long the end of an engine waits for a disk, at least."""

MakeExecutor = Callable[[Model, Params, EngineShape], Executor]


class Engine:
    """Serves requests with one model on one executor.

    Not thread-safe: one thread at a time. `AsyncEngine` serves asyncio programs.

    Args:
      model: implements `models.base.Model`; frozen and hashable.
      params: its weights, a pytree; an argument of every launch, never copied.
      config: sizes and switches.
      policy: orders requests; default first come, first served.
      tokenizer: adds text and stop strings to the outputs.
      executor: makes what runs the plans; default JAX's default device.
      on_event: called with every `core.Event`, in order, once the engine is whole
        again: it may submit and abort requests.

    Raises:
      ValueError: a field of the config that does not fit the model.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        config: EngineConfig | None = None,
        policy: Policy | None = None,
        tokenizer: Decodes | None = None,
        *,
        executor: MakeExecutor | None = None,
        on_event: Callable[[Event], None] | None = None,
    ):
        self.config = config or EngineConfig()
        blocks = num_blocks(model, self.config)
        self.shape = self.config.shape(
            blocks, len(model.eos_ids), padding_is_free=skip_padding(params)
        )
        if policy is not None:
            check_is_policy("policy", policy)
        self.model, self.params = model, on_auto_axes(params)
        self._tokenizer = tokenizer
        self.executor = (executor or _jax_executor(self.config))(
            model, self.params, self.shape
        )
        swap_blocks = num_swap_blocks(model, self.config)
        disk_blocks = num_disk_blocks(model, self.config)
        self.swaps = swap_blocks + disk_blocks > 0
        scheduler = Scheduler(
            self.config,
            self.shape,
            policy or fcfs(),
            swap_blocks,
            disk_blocks,
            self.executor.stored(),
        )
        self._reports = Reports(on_event)
        self._intake = Intake(model, tokenizer, self.config, self.shape)
        self._clients = Clients(scheduler, self._reports, self.now)
        self._loop = Loop(
            self.executor,
            self._clients,
            self._reports,
            self.config,
            self.shape,
            jumps=tokenizer is None,
        )
        self._released = False  # the KV memory is freed
        self.times_restored = 0  # so often its requests became others

    @property
    def _scheduler(self) -> Scheduler:
        return self._clients.scheduler

    # Requests -------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | np.ndarray,
        sampling_params: SamplingParams | None = None,
        arrival_time: float | None = None,
        priority: int = 0,
        user: str | None = None,
        deadline_s: float | None = None,
        tags: Mapping[str, str] | None = None,
        cache_salt: str | None = None,
        *,
        prompt: str | None = None,
    ) -> None:
        """Submit a request; it is served by later calls of `step`.

        Args:
          request_id: unique among the requests that have not ended.
          prompt_token_ids: at least one token id.
          sampling_params: default `SamplingParams()`.
          arrival_time: seconds on the engine's clock (`now`); a future one keeps the
            request out of sight until then. None = now.
          priority: lower goes first, under policies that look at it.
          user, tags: whom and what it is for, under policies that look at them.
          deadline_s: when its last token should be there, on the engine's clock.
          cache_salt: only requests of the same salt share cached blocks.
          prompt: its text, returned with the output; policies may read it.

        Raises:
          ValueError: the request cannot be served; nothing has changed.
        """
        clients = self._clients
        clients.check_new(request_id)
        request = self._intake.request(
            request_id,
            clients.submitted,
            prompt_token_ids,
            SamplingParams() if sampling_params is None else sampling_params,
            now_s=self.now(),
            arrival_time=arrival_time,
            priority=priority,
            user=user,
            deadline_s=deadline_s,
            tags=tags,
            cache_salt=cache_salt,
            text=prompt,
        )
        live = Live(request, self._tokenizer, self.weight_version)
        answer = clients.live[request_id] = Answer(prompt)
        clients.submit(live, answer)
        for _ in range(1, request.params.n):
            sample = self._intake.sample(request, clients.submitted)
            clients.submit(live.forked(sample), answer)

    def fork(
        self,
        request_id: str,
        new_id: str,
        sampling_params: SamplingParams | None = None,
    ) -> SamplingParams:
        """Go on from where a request is in a second way, as a request of its own.

        Launches in flight are read first. The fork has the output so far; it shares
        the KV blocks that are full, gets a copy of the last one, and draws another
        sample of the same random stream from then on. Both end, are aborted and are
        preempted on their own.

        Args:
          request_id: of a request that has not ended.
          new_id: the fork's.
          sampling_params: the fork's, its whole output included in max_tokens; default
            those of the request. logprobs cannot differ.

        Returns:
          The fork's sampling parameters.

        Raises:
          ValueError: it cannot be forked; nothing has changed.
        """
        self._loop.check()
        clients = self._clients
        clients.check_new(new_id)
        if request_id not in clients.live:
            raise ValueError(
                f"request_id={request_id!r} must be of a request that has not ended"
            )
        self._loop.drain()
        if request_id not in clients.live:
            raise ValueError(
                f"request_id={request_id!r} has ended in the launches in flight, and "
                "cannot be forked any more"
            )
        live = clients.live[request_id].lives[0]
        had = live.request
        params = had.params if sampling_params is None else sampling_params
        request = self._intake.fork(had, new_id, clients.submitted, params)
        request.arrival_s = max(request.arrival_s, self.now())
        answer = clients.live[new_id] = Answer(had.text)
        clients.submit(live.forked(request), answer)
        return request.params

    def abort_request(self, request_id: str) -> bool:
        """End a request now; False if no live request has this id.

        Its slot and blocks are given back by the next launch, tokens still in flight
        are dropped, and the id may be used again at once. The next `step` returns its
        output with finish_reason "abort".
        """
        answer = self._clients.live.get(request_id)
        if answer is None:
            return False
        self._clients.abort(answer)
        self._reports.deliver()
        return True

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to return."""
        return bool(self._clients.live) or self._clients.has_outputs

    def get_num_unfinished_requests(self) -> int:
        """Requests that have not ended, those that have not arrived yet included."""
        return len(self._clients.live)

    def take_outputs(self) -> list[RequestOutput]:
        """What `step` would return without a launch: of requests that were aborted, or
        were served by another method, since the last one."""
        return self._clients.take_outputs()

    @property
    def broken(self) -> str | None:
        """Why the engine cannot go on; None while it can."""
        return self._loop.broken

    def now(self) -> float:
        """Seconds on the engine's clock."""
        return self.executor.now()

    def step(self) -> list[RequestOutput]:
        """Plan and submit one launch, and read the oldest once enough are in flight.

        Returns outputs of the requests that got tokens or ended; what they hold, and
        whether there is any before the end, is the request's `output_kind`.
        """
        self._loop.check()
        if not self._released:
            self._loop.turn()
            self._reports.deliver()
        elif self._clients.live:
            raise RuntimeError(
                "release_kv freed the KV memory; call restore_kv before step"
            )
        self._tidy()
        if not self._scheduler.has_requests:
            self._scheduler.settle(self.now())
            if self._clients.num_future and not self._clients.has_outputs:
                self.executor.sleep_until(self._clients.next_arrival_s)
        return self.take_outputs()

    def stats(self) -> dict[str, int | float]:
        """Counters and gauges. Blocks are counted after every launch planned so far."""
        scheduler = self._scheduler
        return {
            "num_blocks": self.shape.num_blocks,
            "free_blocks": scheduler.free_blocks,
            "cached_blocks": scheduler.cached_blocks,
            "idle_cached_blocks": scheduler.idle_cached_blocks,
            "cache_loss_blocks": scheduler.lost_blocks,
            "fragmentation": scheduler.fragmentation,
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting + self._clients.num_future,
            "compiles": self.executor.compiles,
            **scheduler.below,
            **scheduler.moved(self.executor.block_bytes),
            **dataclasses.asdict(scheduler.counters),
            **dataclasses.asdict(self._reports.accounts),
        }

    def reset_prefix_cache(self) -> None:
        """Forget every cached block in every tier, what is on disk included; running
        requests keep the ones they use.

        What nobody uses is free again by the next launch, or at once when idle.
        """
        self._scheduler.reset_prefix_cache()
        self._tidy()

    def _tidy(self) -> None:
        if not self._released:
            self._loop.tidy()
        self._reports.deliver()

    def settle_tiers(self, *, save: bool = False) -> None:
        """Wait until nothing is on its way between the tiers. No request may be left.

        Args:
          save: write to disk what is cached above it, first.

        Raises:
          TimeoutError: nothing has come or gone for `transfer_timeout_s`, and 10 s at
            least.
        """
        if self.has_unfinished_requests():
            raise RuntimeError("requests are left; serve or abort them first")
        self.restore_kv()
        scheduler = self._scheduler
        if save:
            scheduler.save_cached()
        left, since_s = 0, self.now()
        while scheduler.has_chores or scheduler.under_way or self._loop.in_flight:
            if not (scheduler.has_chores or self._loop.in_flight):
                if left != scheduler.under_way:
                    left, since_s = scheduler.under_way, self.now()
                elif self.now() - since_s > self._patience_s:
                    raise TimeoutError(
                        f"{left} KV blocks have been on their way to disk or from it "
                        f"for {self._patience_s:g} s; look after disk_cache_dir="
                        f"{self.config.disk_cache_dir!r}"
                    )
                self.executor.await_arrival(self.now() + 1.0)
            self._loop.turn()
        self._reports.deliver()

    @property
    def _patience_s(self) -> float:
        return max(self.config.transfer_timeout_s, _PATIENCE_S)

    def close(self) -> None:
        """End every request, write to disk what is cached above it, and stop the
        threads. The engine cannot be used afterwards.

        A disk that does not answer is left alone after a while (see `settle_tiers`),
        with a warning; what was not written by then is lost.
        """
        if self._loop.broken is None:
            for request_id in list(self._clients.live):
                self.abort_request(request_id)
            self.take_outputs()
            try:
                self.settle_tiers(save=True)
            except TimeoutError as error:
                warnings.warn(f"the engine is closed anyway: {error}", stacklevel=2)
        self.executor.close(self._patience_s)
        self._loop.broken = "the engine was closed"

    # Weights --------------------------------------------------------------------------

    @property
    def weight_version(self) -> int:
        """How often the weights were replaced."""
        return self._scheduler.weight_version

    def update_params(self, params: Params, mode: Update = "wait") -> int:
        """Serve with other weights from now on: no compilation, no new KV memory.

        Launches in flight are read first, and no block that the old weights computed is
        found again, in any tier. Outputs say which tokens are of which version. Costs
        O(1), but for weights that must be laid out for this machine's kernels
        (O(weights)), and for a disk tier, whose name hashes them.

        Args:
          params: of the structure, shapes and dtypes of those they replace, or in the
            model's plain layout; arrays on a device are taken as they are, sharded ones
            too. (Those sharded otherwise than the ones before compile anew, once.)
          mode: "wait" takes in nobody and serves the requests that hold a slot to
            their end first. "recompute" computes their KV again with the new
            weights; their output goes on where it was. "keep" lets them go on with
            the KV that they have, which nobody else will find.

        Returns:
          The new weight version.

        Raises:
          ValueError: the weights do not fit; nothing has changed.
        """
        self._loop.check()
        if mode not in get_args(Update):
            raise ValueError(f"mode={mode!r} must be one of {list(get_args(Update))}")
        if mode == "recompute" and self.config.batching == "static":
            raise ValueError(
                "mode='recompute' must be 'wait' or 'keep' with batching='static', "
                "which never takes a request off"
            )
        params = replacement(self.model, self.params, params)
        self._loop.drain()
        if mode == "wait":
            self._loop.run_down(lambda: self._scheduler.num_running == 0)
        self.params = params
        version = self.weight_version + 1
        self._scheduler.set_weight_version(version, recompute=mode == "recompute")
        with self._loop.or_break():
            self.executor.set_params(params)
        for live in self._clients.by_index.values():
            live.weights_changed(version)
        self._tidy()
        return version

    def release_kv(self) -> None:
        """Free the device's KV memory, until `restore_kv`.

        Requests that hold a slot lose it as by a preemption, and go on afterwards;
        what is cached goes to the tiers below, as far as there are any. Requests may be
        added meanwhile, and weights replaced; `step` with a request to serve raises
        RuntimeError.
        """
        self._loop.check()
        if self._released:
            return
        if self.config.batching == "static" and self._scheduler.num_running:
            raise RuntimeError(
                "requests run in a static batch, which never takes one off; serve or "
                "abort them first"
            )
        self._loop.drain()
        self._scheduler.take_off()
        self._scheduler.vacates = True
        try:
            self._loop.run_down(lambda: self._scheduler.holds_no_block)
        finally:
            self._scheduler.vacates = False
        with self._loop.or_break():
            self.executor.release_pages()
        self._released = True

    @property
    def released(self) -> bool:
        """Whether the KV memory is freed, so that nobody can be served."""
        return self._released

    def restore_kv(self) -> None:
        """Take the device's KV memory again."""
        self._loop.check()
        if self._released:
            with self._loop.or_break():
                self.executor.restore_pages()
            self._released = False
            self._tidy()

    # State ----------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """The whole engine as a value, all launches being read; weights are left out.

        An engine that resumes it plans the same launches and returns the same tokens.
        """
        self._loop.check()
        if self._released:
            raise RuntimeError("release_kv freed the KV memory; call restore_kv first")
        self._loop.drain()
        state = {
            "executor": self.executor.snapshot(),
            "accounts": self._reports.accounts,
            "last_read_s": self._loop.last_read_s,
            "clients": self._clients.state(),
        }
        policy = self._scheduler.policy
        return Snapshot(
            self.config,
            self.shape,
            self.executor.fingerprint(),
            policy_names(policy),
            self.now(),
            pack(state, {"policy": policy, "tokenizer": self._tokenizer}),
        )

    def restore(self, snapshot: Snapshot, policy: Policy | None = None) -> None:
        """Become the engine that a snapshot was taken of, on its clock.

        What this engine was doing is forgotten, and nobody is told.

        Args:
          policy: orders the requests from now on; it hears of each, and how far it has
            got, as if that had just happened. None goes on with the snapshot's, which
            must be the one that this engine was made with.

        Raises:
          ValueError: the snapshot is of another configuration, model or policy, or of
            other weights; nothing has changed.
        """
        self._loop.check()
        self.restore_kv()
        self._loop.drain()
        ours = policy_names(self._scheduler.policy)
        for name, theirs, mine in (
            ("config", snapshot.config, self.config),
            ("shape", snapshot.shape, self.shape),
            ("policy", snapshot.policy, ours if policy is None else snapshot.policy),
        ):
            if theirs != mine:
                raise ValueError(
                    f"the snapshot's {name}={theirs} must be this engine's, {mine}; "
                    "make an engine that is alike, or give restore a policy"
                )
        if snapshot.fingerprint != self.executor.fingerprint():
            raise ValueError(
                "the snapshot is of another model or other weights; load those first"
            )
        if policy is not None:
            check_is_policy("policy", policy)
        with self._loop.or_break():
            kept = {"policy": self._scheduler.policy, "tokenizer": self._tokenizer}
            state = unpack(snapshot.data, kept)
            self.executor.restore(state["executor"], snapshot.time_s)
            self._reports.restart(state["accounts"])
            self._clients.resume(state["clients"])
            self._loop.last_read_s = state["last_read_s"]
            self.times_restored += 1
            if policy is not None:
                self._scheduler.take_over(policy)

    def holds_nothing(self) -> bool:
        """Whether no map of the engine or the scheduler has an entry left."""
        told = self._reports.delivered and not self._loop.in_flight
        mine = self._clients.holds_nothing() and self._scheduler.holds_nothing()
        return told and mine


def _jax_executor(config: EngineConfig) -> MakeExecutor:
    def make(model: Model, params: Params, shape: EngineShape) -> Executor:
        from jaxserve.executors.jax_executor import JaxExecutor, open_store

        store = None
        if num_disk_blocks(model, config) and config.disk_cache_dir is not None:
            store = open_store(config.disk_cache_dir, model, params, shape)
        return JaxExecutor(model, params, shape, store=store)

    return make
