"""Drives engines on the hash model in tests: workloads, clocks, recorded plans.

The oracle is the model's definition, `next_token`, applied to the context directly; for
random requests, with the documented key of each position.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import tempfile
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve import Engine, EngineConfig, RequestOutput, SamplingParams
from jaxserve.core import Event, StepOutput, StepPlan
from jaxserve.executors.cost_model import LinearCost
from jaxserve.executors.jax_executor import JaxExecutor, open_store
from jaxserve.executors.link import LinkCost
from jaxserve.executors.sim_executor import SimExecutor, Truth
from jaxserve.models.hash_model import HashModel, next_token
from jaxserve.moves import Moves
from jaxserve.scheduling.policies import Policy

EOS = (7, 50)
COST = LinearCost()
LINK = LinkCost(block_s=0.003, fixed_s=0.002)
DISK = LinkCost(block_s=0.005, fixed_s=0.004)
GREEDY = SamplingParams(temperature=0.0)


def greedy(max_tokens: int | None, **more: object) -> SamplingParams:
    """Greedy parameters."""
    return dataclasses.replace(GREEDY, max_tokens=max_tokens, **more)  # type: ignore[arg-type]


def direct(prompt: Sequence[int], n: int, eos: Sequence[int] = ()) -> list[int]:
    """The hash model's greedy output by its definition, without an engine."""
    out: list[int] = []
    while len(out) < n:
        out.append(next_token([*prompt, *out]))
        if out[-1] in eos:
            break
    return out


@functools.cache
def _noise(seed: int, position: int) -> np.ndarray:
    """Gumbel noise of one position, by the documented key scheme; f32[97]."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 0), position)
    return np.asarray(jax.random.gumbel(key, (97,), jnp.float32))


def direct_random(
    prompt: Sequence[int], n: int, seed: int, eos: Sequence[int] = ()
) -> list[int]:
    """The hash model's output at temperature 1, without an engine."""
    out: list[int] = []
    while len(out) < n:
        context = [*prompt, *out]
        away = (np.arange(97) - next_token(context)) % 97
        logits = away.astype(np.float32) * np.float32(-0.25)
        out.append(int(np.argmax(logits + _noise(seed, len(context)))))
        if out[-1] in eos:
            break
    return out


@dataclasses.dataclass
class Job:
    """A request of a workload."""

    prompt: list[int]
    max_tokens: int
    arrival_s: float = 0.0
    salt: str | None = None
    abort_after: int | None = None  # engine steps after submission
    priority: int = 0
    seed: int | None = None  # draws at temperature 1; None is greedy

    def expected(self, eos: Sequence[int] = ()) -> list[int]:
        """Its output by the model's definition."""
        if self.seed is not None:
            return direct_random(self.prompt, self.max_tokens, self.seed, eos)
        return direct(self.prompt, self.max_tokens, eos)

    @property
    def params(self) -> SamplingParams:
        """Its sampling parameters."""
        temperature = 0.0 if self.seed is None else 1.0
        return SamplingParams(
            temperature=temperature, seed=self.seed, max_tokens=self.max_tokens
        )


def workload(
    seed: int,
    n: int,
    *,
    longest_prompt: int = 24,
    longest_output: int = 20,
    spread_s: float = 0.5,
    aborts: bool = False,
) -> list[Job]:
    """Random requests: shared prefixes, whole blocks, single tokens, a few salts."""
    rng = random.Random(seed)
    shared = [[rng.randrange(97) for _ in range(16)] for _ in range(2)]
    jobs = []
    for _ in range(n):
        prefix = rng.choice(shared)[: rng.choice([0, 4, 8, 12, 16])]
        own = rng.randint(0 if prefix else 1, max(1, longest_prompt - len(prefix)))
        prompt = prefix + [rng.randrange(97) for _ in range(own)]
        jobs.append(
            Job(
                prompt=prompt,
                max_tokens=rng.randint(1, longest_output),
                arrival_s=round(rng.random() * spread_s, 3),
                salt=rng.choice([None, None, None, "a"]),
                abort_after=rng.randint(0, 12)
                if aborts and rng.random() < 0.2
                else None,
                priority=rng.randrange(3),
                seed=rng.choice([None, None, rng.randrange(8)]),
            )
        )
    return jobs


class Recorder:
    """An executor that keeps the plans it was given and the outputs it returned."""

    def __init__(self, inner):
        self.inner = inner
        self.plans: list[StepPlan] = []
        self.moves: list[Moves] = []
        self.outputs: list[StepOutput] = []

    def submit(self, plan, who, moves):
        self.plans.append(plan)
        self.moves.append(moves)
        return self.inner.submit(plan, who, moves)

    def result(self, ticket):
        output = self.inner.result(ticket)
        self.outputs.append(output)
        return output

    def __getattr__(self, name):
        return getattr(self.inner, name)


@dataclasses.dataclass
class Run:
    """What a run left behind."""

    engine: Engine
    recorder: Recorder
    outputs: dict[str, RequestOutput]
    events: list[Event]


def make_engine(
    config: EngineConfig,
    *,
    eos: tuple[int, ...] = (),
    policy: Policy | None = None,
    cost: LinearCost | None = COST,
    truth: dict[int, Truth] | None = None,
) -> tuple[Engine, Recorder, list[Event]]:
    """An engine on the hash model; `truth` makes it a simulated one."""
    model = HashModel(eos_ids=eos)
    events: list[Event] = []
    recorders: list[Recorder] = []

    def executor(model, params, shape):
        if truth is None:
            store = None
            if config.num_disk_blocks:
                store = open_store(tempfile.mkdtemp(), model, params, shape)
            inner = JaxExecutor(
                model, params, shape, cost=cost, link=LINK, disk=DISK, store=store
            )
            recorder = Recorder(inner)
        else:
            assert cost is not None
            recorder = Recorder(SimExecutor(shape, truth, cost, link=LINK, disk=DISK))
        recorders.append(recorder)
        return recorder

    engine = Engine(
        model,
        model.init_params(),
        config,
        policy,
        executor=executor,
        on_event=events.append,
    )
    return engine, recorders[0], events


def drive(
    jobs: Sequence[Job],
    config: EngineConfig,
    *,
    eos: tuple[int, ...] = (),
    policy: Policy | None = None,
    simulate: bool = False,
    cost: LinearCost = COST,
) -> Run:
    """Serve the jobs to the end, in logical time."""
    truth = None
    if simulate:
        truth = {}
        for i, job in enumerate(jobs):
            tokens = job.expected(eos)
            truth[i] = Truth(tokens, bool(tokens) and tokens[-1] in eos)
    engine, recorder, events = make_engine(
        config, eos=eos, policy=policy, cost=cost, truth=truth
    )
    for i, job in enumerate(jobs):
        engine.add_request(
            str(i),
            job.prompt,
            job.params,
            arrival_time=job.arrival_s,
            priority=job.priority,
            cache_salt=job.salt,
        )
    outputs: dict[str, RequestOutput] = {}
    steps = 0
    while engine.has_unfinished_requests():
        for i, job in enumerate(jobs):
            if job.abort_after == steps:
                engine.abort_request(str(i))
        for output in engine.step():
            outputs[output.request_id] = output
        steps += 1
        assert steps < 200 * (len(jobs) + 5), "the engine makes no progress"
    engine.settle_tiers()
    return Run(engine, recorder, outputs, events)


def same_plans(a: Sequence[StepPlan], b: Sequence[StepPlan]) -> bool:
    """Whether two plan streams are equal, field by field."""
    return len(a) == len(b) and all(
        np.array_equal(x, y)
        for one, two in zip(a, b, strict=True)
        for x, y in zip(one, two, strict=True)
    )
