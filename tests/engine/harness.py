"""Runs the engine on the reference executor, by hand or to the end; test-only policies.

`free` is the cases' word: blocks that are free or cached for nobody.
"""

from __future__ import annotations

import dataclasses
import random
import tempfile
from collections.abc import Callable, Sequence

from jaxserve import Engine, EngineConfig, RequestOutput, SamplingParams
from jaxserve.core import Event
from jaxserve.executors.base import Executor
from jaxserve.executors.cost_model import LinearCost
from jaxserve.executors.jax_executor import JaxExecutor, open_store
from jaxserve.executors.link import LinkCost
from jaxserve.executors.sim_executor import SimExecutor, Truth
from jaxserve.models.detokenizer import Decodes
from jaxserve.models.hash_model import HashModel
from jaxserve.outputs import joined
from jaxserve.scheduling.policies import Policy, fcfs
from tests.engine.reference_executor import ReferenceExecutor
from tests.serving import Job, Recorder, Run, greedy

SIM_C = LinearCost(fixed_s=0.010, token_s=0.001)
"""The cases' simulated clock: a step costs 10 ms + 1 ms per token scheduled in it."""

LINK = LinkCost(block_s=0.004, fixed_s=0.001)
"""A way to the host on which a request's blocks take longer than a step."""


DISK = LinkCost(block_s=0.007, fixed_s=0.002)
"""A disk that is slower yet."""

JAX = EngineConfig(
    max_model_len=48,
    max_num_seqs=9,  # row buckets 8 and 9
    max_num_batched_tokens=16,
    block_size=4,
    num_blocks=64,
    max_logprobs=3,
)
"""What tests on the real executor share, so that its programs compile once. Fields that
are not in its shape may be replaced."""

JAX_4_STEPS = dataclasses.replace(JAX, num_scheduler_steps=4)


def by_priority() -> Policy:
    """Class = priority, lower first; FCFS within a class."""
    return fcfs()._replace(
        rank=lambda state, view, now_s: (view.priority, (view.arrival_s, view.index))
    )


def equals() -> Policy:
    """Class = priority, and equal keys within a class: only the ties decide."""
    return fcfs()._replace(rank=lambda state, view, now_s: (view.priority, ()))


BLOCK_SIZES = (1, 2, 4, 8)
SCHEDULES = ((1, 1), (2, 1), (3, 1), (1, 4), (2, 4))  # launches in flight, steps
EVERY_KIND = [(b, n, k) for b in BLOCK_SIZES for n, k in SCHEDULES]


def config(block_size: int, launches: int, steps: int, **fields) -> EngineConfig:
    """A small engine; a budget that holds any prompt here whole."""
    return EngineConfig(
        **{
            "block_size": block_size,
            "launches_in_flight": launches,
            "num_scheduler_steps": steps,
            "max_model_len": 64,
            "max_num_seqs": 2,
            "max_num_batched_tokens": 64,
            "max_logprobs": 0,
            **fields,
        }
    )


class _Watch(Recorder):
    """A recorder that also notes what the host reserved for each launch."""

    def __init__(self, inner, served: Served):
        super().__init__(inner)
        self._served = served

    def submit(self, plan, who, moves):
        self._served.free_planned.append(self._served.stats()["free_blocks"])
        return super().submit(plan, who, moves)


class Served:
    """An engine with its clock on Sim-C, its plans and its events."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        policy: Policy | None = None,
        eos: tuple[int, ...] = (),
        tokenizer: Decodes | None = None,
        executor: Callable[[HashModel, object, object], Executor] | None = None,
        cost: LinearCost = SIM_C,
        link: LinkCost = LINK,
        disk: LinkCost = DISK,
        faults: float = 0.0,
        seed: int = 0,
    ):
        self.events: list[Event] = []
        self.outputs: dict[str, RequestOutput] = {}  # the last, or all deltas joined
        self.deltas: dict[str, list[RequestOutput]] = {}  # of those that ask for them
        self.free_planned: list[int] = []  # blocks left by each launch, as submitted
        model = HashModel(eos_ids=eos)

        def make(model, params, shape):
            inner = (
                executor(model, params, shape)
                if executor
                else ReferenceExecutor(shape, cost, seed, link, disk, faults)
            )
            self.recorder = _Watch(inner, self)
            return self.recorder

        self.engine = Engine(
            model,
            model.init_params(),
            config,
            policy,
            tokenizer,
            executor=make,
            on_event=self.events.append,
        )

    def add(self, name: str, prompt: Sequence[int], max_tokens: int | None, **more):
        """Submit a greedy request; sampling fields go to its parameters."""
        fields = {f.name for f in dataclasses.fields(SamplingParams)}
        sampling = {k: more.pop(k) for k in list(more) if k in fields}
        self.submit(name, prompt, greedy(max_tokens, **sampling), **more)

    def submit(self, name: str, prompt: Sequence[int], params, **more) -> None:
        """Submit a request."""
        self.engine.add_request(name, prompt, params, **more)
        self.deltas.pop(name, None)
        if params.output_kind == "delta":
            self.deltas[name] = []

    def step(self) -> list[RequestOutput]:
        """One engine step; outputs are kept by name. Each extends the one before it,
        and none follows a finished one."""
        new = self.engine.step()
        for output in new:
            name = output.request_id
            before = self.outputs.get(name)
            if name in self.deltas:
                self.deltas[name].append(output)
                if before is not None and not before.finished:
                    output = joined(before, output)
            tokens = [c.token_ids for c in output.outputs]
            ends = [c.finish_reason for c in output.outputs]
            if before is not None and not before.finished:
                had = [c.token_ids for c in before.outputs]
                for old, ids in zip(had, tokens, strict=True):
                    assert ids[: len(old)] == old, "told tokens are taken back"
                ended = ends != [c.finish_reason for c in before.outputs]
                assert tokens != had or ended, "nothing is new"
            elif before is not None:
                assert before.metrics.arrival_s != output.metrics.arrival_s or (
                    before.prompt_token_ids != output.prompt_token_ids
                ), "an output follows the last one"
            self.outputs[name] = output
        return new

    def until(self, condition: Callable[[], bool]) -> None:
        """Step until the condition holds."""
        for _ in range(2000):
            if condition():
                return
            self.step()
        raise AssertionError("the engine makes no progress")

    def finish(self) -> None:
        """Step until nothing is left; nothing may leak."""
        self.until(lambda: not self.engine.has_unfinished_requests())
        self.engine.settle_tiers()
        self.check_nothing_is_left()

    def check_nothing_is_left(self) -> None:
        """No map of the engine has an entry left, and host and disk have no block
        but what is cached."""
        assert self.engine.holds_nothing()
        stats = self.stats()
        assert stats["swapped_blocks"] == 0
        assert stats["host_blocks"] == stats["host_cached_blocks"]
        inner = self.recorder.inner
        if isinstance(inner, ReferenceExecutor):
            assert len(inner.host) == stats["host_cached_blocks"]
            assert len(inner.disk) == stats["disk_blocks"]
            assert not inner._staged
        elif isinstance(inner, JaxExecutor):
            assert inner.num_payloads == stats["host_cached_blocks"]

    def run(self, name: str, prompt: Sequence[int], max_tokens: int, **more):
        """Serve one more request to its end."""
        self.add(name, prompt, max_tokens, **more)
        self.finish()
        return self.outputs[name]

    def tokens(self, name: str) -> list[int]:
        """Output tokens of a request so far."""
        if name not in self.outputs:
            return []
        return self.outputs[name].outputs[0].token_ids

    def reason(self, name: str) -> str | None:
        """Why a request ended."""
        return self.outputs[name].outputs[0].finish_reason

    def free(self) -> int:
        """Blocks that are free or cached for nobody, after every launch planned."""
        stats = self.stats()
        return stats["free_blocks"] + stats["idle_cached_blocks"]

    def stats(self) -> dict:
        """The engine's counters and gauges."""
        return self.engine.stats()

    def of(self, kind: str, name: str | None = None) -> list[Event]:
        """The events of a kind, of one request or of all."""
        return [
            e
            for e in self.events
            if e.kind == kind and (name is None or e.request_id == name)
        ]


def jax_executor(cost: LinearCost | None = SIM_C):
    """A maker of the real executor on a logical clock."""

    def make(model, params, shape):
        store = open_store(tempfile.mkdtemp(), model, params, shape)
        return JaxExecutor(
            model, params, shape, cost=cost, link=LINK, disk=DISK, store=store
        )

    return make


def sim_executor(truth: dict[int, Truth], cost: LinearCost = SIM_C):
    """A maker of the simulated executor."""
    return lambda model, params, shape: SimExecutor(
        shape, truth, cost, link=LINK, disk=DISK
    )


def truths(jobs: Sequence[Job], eos: Sequence[int] = ()) -> dict[int, Truth]:
    """What each job's output would be, for a simulation."""
    found = {}
    for i, job in enumerate(jobs):
        tokens = job.expected(eos)
        found[i] = Truth(tokens, bool(tokens) and tokens[-1] in eos)
    return found


def order(served: Served, kind: str) -> list[str]:
    """Who the events of a kind are about, first to last."""
    return [e.request_id or "" for e in served.of(kind)]


EXECUTORS = {"definition": None, "device": jax_executor()}
URGENT = 90
R_5_TO_9 = [55, 4, 67, 48, 13, 73, 37, 88]
"""The cases' output of [5..9]."""


def preempt(served: Served) -> None:
    """Displace whoever runs by an urgent request, on an engine without a free slot."""
    name = f"urgent {len(served.events)}"
    served.add(name, [URGENT], 1, priority=-1)
    served.until(lambda: bool(served.tokens(name)))


def preempt_at_every_output(served: Served) -> int:
    """Serve request "r" to its end, displacing it whenever it has got tokens, and once
    in its prompt; return how many requests displaced it."""
    served.step()
    preempt(served)
    displaced, had = 1, len(served.tokens("r"))
    while served.engine.has_unfinished_requests():
        served.step()
        if had < len(served.tokens("r")) and served.reason("r") is None:
            had = len(served.tokens("r"))
            preempt(served)
            displaced += 1
    served.check_nothing_is_left()
    return displaced


def serve(served: Served, jobs: Sequence[Job], *, resets: Sequence[int] = ()) -> Run:
    """Submit all jobs and serve them to the end, forgetting the cache at some steps."""
    for i, job in enumerate(jobs):
        served.submit(
            str(i),
            job.prompt,
            job.params,
            arrival_time=job.arrival_s,
            priority=job.priority,
            cache_salt=job.salt,
        )
    steps = 0
    while served.engine.has_unfinished_requests():
        for i, job in enumerate(jobs):
            if job.abort_after == steps:
                served.engine.abort_request(str(i))
        if steps in resets:
            served.engine.reset_prefix_cache()
        served.step()
        steps += 1
        assert steps < 300 * (len(jobs) + 5), "the engine makes no progress"
    return Run(served.engine, served.recorder, served.outputs, served.events)


def random_config(rng: random.Random, **fixed) -> EngineConfig:
    """Small engines of every kind; `fixed` fields override."""
    seqs = rng.randint(1, 5)
    size = rng.choice([1, 2, 4, 8])
    fields = {
        "max_model_len": 64,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": rng.choice([seqs, seqs + 3, 16, 40]),
        "block_size": size,
        "num_blocks": -(-rng.choice([44, 60, 120]) // size),
        "enable_prefix_caching": rng.random() < 0.8,
        "num_scheduler_steps": rng.choice([1, 2, 4]),
        "launches_in_flight": rng.choice([1, 2, 3]),
        "max_chunk_tokens": rng.choice([None, None, 3, 8]),
        "skip_limit": rng.choice([0, 0, 3]),
        "max_logprobs": 2,
        "preemption_mode": rng.choice(["recompute", "swap", "swap", "disk", "auto"]),
        "num_swap_blocks": rng.choice([0, 3, 12, 200]),
        "num_disk_blocks": rng.choice([0, 0, 3, 12, 200]),
        "tier_write": rng.choice(["never", "on_eviction", "through"]),
        "tier_eviction": rng.choice(["lru", "lfu", "cost"]),
    }
    return EngineConfig(**{**fields, **fixed})
