"""Drives engines on the hash model in tests: workloads, clocks, recorded plans.

The oracle is the model's definition, `next_token`, applied to the context directly; for
random requests, with the documented key of each position.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
from jaxserve.outputs import joined
from jaxserve.scheduling.policies import Policy
from tests import processing

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
def gumbel(seed: int, position: int, sample: int = 0) -> np.ndarray:
    """Gumbel noise of one position, by the documented key scheme; f32[97]."""
    key = jax.random.fold_in(jax.random.key(seed), sample)
    key = jax.random.fold_in(key, position)
    return np.asarray(jax.random.gumbel(key, (97,), jnp.float32))


def hash_logits(context: Sequence[int]) -> np.ndarray:
    """The hash model's logits by its definition, f32[97]."""
    return logits_around(next_token(context))


def logits_around(token: int) -> np.ndarray:
    """The hash model's logits where this is the likeliest token, f32[97]."""
    away = (np.arange(97) - token) % 97
    return away.astype(np.float32) * np.float32(-0.25)


def direct_random(
    prompt: Sequence[int], n: int, seed: int, eos: Sequence[int] = ()
) -> list[int]:
    """The hash model's output at temperature 1, without an engine."""
    return sampled(prompt, [], n, seed, 0, eos)


def sampled(
    prompt: Sequence[int],
    output: Sequence[int],
    n: int,
    seed: int,
    sample: int,
    eos: Sequence[int] = (),
) -> list[int]:
    """Of a fork: n tokens, those it had included, then its own sample."""
    out = list(output)
    while len(out) < n:
        context = [*prompt, *out]
        out.append(draw(hash_logits(context), seed, len(context), sample))
        if out[-1] in eos:
            break
    return out


def draw(logits: np.ndarray, seed: int | None, position: int, sample: int = 0) -> int:
    """The token drawn at temperature 1, or the likeliest if there is no seed."""
    noise = 0 if seed is None else gumbel(seed, position, sample)
    return int(np.argmax(logits + noise))


def direct_with(
    prompt: Sequence[int],
    params: SamplingParams,
    eos: Sequence[int] = (),
    sample: int = 0,
    encode: Callable[[str], list[int]] = processing.NUMBERS.encode,
) -> list[int]:
    """The hash model's output under any fields, without an engine."""
    out: list[int] = []
    assert params.max_tokens is not None
    while len(out) < params.max_tokens:
        context = [*prompt, *out]
        logits = hash_logits(context)
        logits = processing.process_as(params, logits, prompt, out, encode)
        if len(out) < params.min_tokens:
            logits[list(eos)] = -np.inf
        out.append(draw(logits, params.seed, len(context), sample))
        if out[-1] in eos:
            break
    return out


def direct_scores(prompt: Sequence[int]) -> list[float]:
    """Log-probability of each prompt token but the first, on the hash model."""
    scores = []
    for at, token in enumerate(prompt[1:], start=1):
        scores.append(float(processing.log_softmax(hash_logits(prompt[:at]))[token]))
    return scores


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
    output_kind: str = "cumulative"
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def expected(self, eos: Sequence[int] = ()) -> list[int]:
        """Its output by the model's definition."""
        if self.fields:
            return direct_with(self.prompt, self.params, eos)
        if self.seed is not None:
            return direct_random(self.prompt, self.max_tokens, self.seed, eos)
        return direct(self.prompt, self.max_tokens, eos)

    @property
    def params(self) -> SamplingParams:
        """Its sampling parameters."""
        fields = dict(self.fields)
        if "min_tokens" in fields:
            fields["min_tokens"] = min(fields["min_tokens"], self.max_tokens)
        return SamplingParams(
            temperature=0.0 if self.seed is None else 1.0,
            seed=self.seed,
            max_tokens=self.max_tokens,
            output_kind=self.output_kind,  # type: ignore[arg-type]
            **fields,
        )

    def check_scores(self, output: RequestOutput) -> None:
        """Its prompt's log-probabilities are those of the model's definition."""
        asked = "prompt_logprobs" in self.fields
        if not asked or not output.outputs[0].token_ids:
            assert asked or output.prompt_logprobs is None
            return
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        rows, scores = output.prompt_logprobs[1:], direct_scores(self.prompt)
        assert len(rows) == len(scores)
        for row, token, score in zip(rows, self.prompt[1:], scores, strict=True):
            assert row is not None and abs(row[token].logprob - score) < 1e-5
            assert len(row) <= 1 + self.fields["prompt_logprobs"]


def workload(
    seed: int,
    n: int,
    *,
    longest_prompt: int = 24,
    longest_output: int = 20,
    spread_s: float = 0.5,
    aborts: bool = False,
    kinds: bool = False,
    fields: bool = False,
) -> list[Job]:
    """Random requests: shared prefixes, whole blocks, single tokens, a few salts.

    Args:
      kinds: outputs of every kind; else cumulative ones.
      fields: half of them have fields of `SamplingParams`.
    """
    rng, kind = random.Random(seed), random.Random(f"kinds {seed}")
    told = ["cumulative", "delta", "final_only"] if kinds else ["cumulative"]
    shared = [[rng.randrange(97) for _ in range(16)] for _ in range(2)]
    jobs = []
    more = random.Random(f"fields {seed}")
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
                output_kind=kind.choice(told),
                fields=processing.random_fields(more)
                if fields and more.random() < 0.5
                else {},
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
        processing.Numbers(),
        executor=executor,
        on_event=events.append,
    )
    return engine, recorders[0], events


def keep(
    outputs: dict[str, RequestOutput], jobs: Sequence[Job], output: RequestOutput
) -> None:
    """Add an output of job "i" to all that has been told of it."""
    name = output.request_id
    more = jobs[int(name)].output_kind == "delta" and name in outputs
    outputs[name] = joined(outputs[name], output) if more else output


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
            keep(outputs, jobs, output)
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
