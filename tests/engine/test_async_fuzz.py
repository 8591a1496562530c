"""A fuzzer of AsyncEngine: random clients of several threads, right and wrong, against
random engines in tight memory.

Every answer is compared with the model's definition, an aborted one with its beginning.
At the end everything is free. The seed decides what is asked; when it happens is the
threads' own. `ACTIONS` is the place for more kinds of clients.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import faulthandler
import functools
import math
import random
import re
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from jaxserve import (
    AsyncEngine,
    Engine,
    EngineStopped,
    QueueFull,
    RequestOutput,
    SamplingParams,
)
from jaxserve.core import Event
from jaxserve.outputs import CompletionOutput, joined
from jaxserve.scheduling.policies import get_policy
from tests.engine.harness import JAX, Served, random_config
from tests.engine.test_cases_tiers import faulty, trouble
from tests.engine.test_policies_invariance import SPECS
from tests.processing import Numbers
from tests.serving import EOS, Job, direct_with, workload

LIMIT_S = 240.0


class Letters:
    """A tokenizer of one character a token."""

    def decode(self, ids) -> str:
        return "".join(chr(0x4E00 + token) for token in ids)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) - 0x4E00 for letter in text if letter != " "]


class Answer(NamedTuple):
    """What one sample of a whole answer holds."""

    tokens: list[int]
    text: str
    reason: str

    def check(self, got: CompletionOutput, *, aborted: bool) -> None:
        """It must be this, or the beginning of it."""
        assert got.token_ids == self.tokens[: len(got.token_ids)], "wrong tokens"
        if got.finish_reason == "abort":
            assert aborted, "nobody aborted it"
            # What might have been the start of a stop string is shown now. And in a
            # static batch a whole answer may be waiting for the others'.
            shown = Letters().decode(got.token_ids)
            all_there = (got.token_ids, got.text) == (self.tokens, self.text)
            assert got.text == shown or all_there, "wrong text"
            return
        assert self.text.startswith(got.text), "wrong text"
        if got.finish_reason is not None:
            assert (got.token_ids, got.text, got.finish_reason) == self


@dataclasses.dataclass
class Ask:
    """A request, and its answer."""

    prompt: Any
    params: SamplingParams
    terms: dict[str, Any]
    job: Job  # that it is made of
    answers: list[Answer]  # of each sample

    def check(self, outputs: list[RequestOutput], *, aborted: bool) -> None:
        """What came must be the answer, or the beginning of one that was aborted or
        left; each output extends the ones before."""
        if not outputs:
            return
        last = outputs[0]
        for output in outputs[1:]:
            assert not last.finished, "an output follows the last one"
            if self.params.output_kind == "delta":
                last = joined(last, output)
                continue
            for old, new in zip(last.outputs, output.outputs, strict=True):
                assert new.token_ids[: len(old.token_ids)] == old.token_ids
            last = output
        for answer, got in zip(self.answers, last.outputs, strict=True):
            answer.check(got, aborted=aborted)
            assert got.finish_reason is not None or not last.finished
        if last.finished and not aborted:
            self.job.check_scores(last)


class World:
    """An engine under fire, and what its clients share."""

    def __init__(self, seed: int, folder: Path):
        rng = random.Random(seed)
        self.eos = rng.choice([(), EOS])
        self.jobs = [_in_letters(job) for job in workload(seed, 30, fields=True)]
        self.expected = functools.cache(self._expected)
        self.ids = [f"name {i}" for i in range(6)]  # that clients give and abort
        self.aborted: set[str] = set()
        self.seen: collections.Counter[str] = collections.Counter()
        self._callbacks = random.Random(f"callbacks {seed}")
        self._lock = threading.Lock()
        policy = get_policy(rng.choice([s for s in SPECS if "oracle" not in s]))
        if rng.random() < 0.75:
            self.served = Served(
                random_config(rng, **rng.choice(BATCHING)),
                policy=policy,
                eos=self.eos,
                tokenizer=Letters(),
                faults=rng.choice([0.0, 0.1]),
                seed=seed,
            )
        else:  # on the device, in wall time, and a disk in trouble
            shape = dataclasses.replace(
                JAX,
                num_blocks=16,
                num_swap_blocks=rng.choice([0, 12]),
                num_disk_blocks=rng.choice([20, 200]),
                preemption_mode=rng.choice(["disk", "auto", "swap", "recompute"]),
                tier_write=rng.choice(["through", "on_eviction"]),
                launches_in_flight=rng.choice([1, 2, 3]),
                transfer_timeout_s=rng.choice([0.005, 30.0]),
            )
            self.served = faulty(
                folder,
                shape,
                functools.partial(trouble, random.Random(seed), folder),
                policy=policy,
                eos=self.eos,
                tokenizer=Letters(),
            )
        self.served.engine._reports._on_event = self._on_event
        self.engine = AsyncEngine(
            self.served.engine,
            Letters(),  # type: ignore[arg-type]
            max_waiting=rng.choice([None, None, 0, 5]),
        )

    def _expected(
        self, i: int, sample: int, stop_ids: tuple[int, ...] = ()
    ) -> list[int]:
        """Tokens of a sample of a job, as if no stop string ended it."""
        job = self.jobs[i]
        return direct_with(job.prompt, job.params, stop_ids, sample, Letters().encode)

    def check_fork(self, output: RequestOutput) -> None:
        """All of a greedy one, however it was made, are tokens of its job; of a delta
        they are the last. (What stops it nobody here knows.)"""
        prompt, got = output.prompt_token_ids, output.outputs[0].token_ids
        like = [i for i, job in enumerate(self.jobs) if job.prompt == prompt]
        assert like, "a prompt that nobody asked for"
        if any(self.jobs[i].seed is not None for i in like):
            return  # its place in the random stream is not known
        if any("min_tokens" in self.jobs[i].fields for i in like):
            return  # stop ids decide what is drawn
        whole = [self.expected(i, 0) for i in like]
        cuts = range(21)
        assert any(w[c : c + len(got)] == got for w in whole for c in cuts), "wrong"
        self.count("forks checked")

    def count(self, what: str) -> None:
        with self._lock:
            self.seen[what] += 1

    def abort_soon(self, name: str) -> None:
        """Whoever has this id may see an abort."""
        self.aborted.add(name)

    def _on_event(self, event: Event) -> None:
        """Sometimes abort a request from inside the engine."""
        if event.request_id and self._callbacks.random() < 0.005:
            self.abort_soon(event.request_id)
            self.served.engine.abort_request(event.request_id)
            self.count("aborts by a callback")

    def ask(self, rng: random.Random) -> Ask:
        """A request that can be served, and its answer."""
        i, n = rng.randrange(len(self.jobs)), rng.choice([1, 1, 1, 2, 3])
        job, unstopped = self.jobs[i], self.expected(i, 0)
        more: dict[str, Any] = {"n": n, "output_kind": rng.choice(KINDS)}
        stop, stop_ids, kind = "", self.eos, rng.random()
        if kind < 0.25:
            text = Letters().decode(unstopped)
            start = rng.randrange(len(text))
            more["stop"] = stop = text[start : start + rng.randint(1, 3)]
        elif kind < 0.4:
            more["stop_token_ids"] = [rng.choice(unstopped)]
            stop_ids += tuple(more["stop_token_ids"])
        params = dataclasses.replace(job.params, **more)
        answers = [
            ended(self.expected(i, k, stop_ids), stop, stop_ids, params.min_tokens)
            for k in range(n)
        ]
        prompt: Any = rng.choice(FORMS)(job)
        terms = {
            "priority": job.priority,
            "user": rng.choice([None, "ann", "ben"]),
            "tags": rng.choice([None, {"kind": "chat"}]),
        }
        if rng.random() < 0.3:
            terms["cache_salt"] = rng.choice(["a", "b"])
        if rng.random() < 0.2:
            terms["arrival_time"] = self.engine.now() + rng.random() * 0.05
        if rng.random() < 0.3:
            terms["deadline_s"] = self.engine.now() + rng.random()
        return Ask(prompt, params, terms, job, answers)

    def generate(self, ask: Ask, name: str | None) -> AsyncGenerator:
        return self.engine.generate(ask.prompt, ask.params, name, **ask.terms)


def _in_letters(job: Job) -> Job:
    """A job whose bad words are texts of `Letters`, and which can be served with any
    stop ids."""
    fields = dict(job.fields)
    if "bad_words" in fields:
        words = map(Numbers().encode, fields["bad_words"])
        fields["bad_words"] = [Letters().decode(ids) for ids in words]
    if "allowed_token_ids" in fields:
        fields.pop("min_tokens", None)
    return dataclasses.replace(job, fields=fields)


def ended(
    tokens: list[int], stop: str, stop_ids: tuple[int, ...], min_tokens: int
) -> Answer:
    """Where an output of these tokens ends, by decoding all of it after each."""
    for n, token in enumerate(tokens, start=1):
        text = Letters().decode(tokens[: n - (token in stop_ids)])
        if token in stop_ids:
            return Answer(tokens[:n], text, "stop")
        if stop and n >= min_tokens and text.endswith(stop):
            return Answer(tokens[:n], text.removesuffix(stop), "stop")
    return Answer(tokens, Letters().decode(tokens), "length")


KINDS = ("cumulative", "delta", "final_only")
BATCHING: list[dict[str, Any]] = [
    {},
    {},
    {"batching": "static"},
    {"prefill": "prefill_first"},
    {"prefill": "decode_first"},
]
FORMS: list[Callable[[Job], Any]] = [
    lambda job: job.prompt,
    lambda job: np.array(job.prompt, np.uint8),
    lambda job: tuple(job.prompt),
    lambda job: Letters().decode(job.prompt),
    lambda job: {"prompt": Letters().decode(job.prompt)},
    lambda job: {"prompt_token_ids": job.prompt},
]


# Clients ------------------------------------------------------------------------------


async def nap(rng: random.Random) -> None:
    await asyncio.sleep(rng.choice([0, 0, 0.0005, 0.003]))


async def take_all(world: World, rng: random.Random) -> None:
    """A client that wants its answer, now and then a slow one."""
    ask, slow = world.ask(rng), rng.random() < 0.3
    name = rng.choice([*world.ids, None, None])
    outputs = []
    try:
        async for output in world.generate(ask, name):
            outputs.append(output)
            if slow:
                await nap(rng)
    except QueueFull:
        world.count("refused: full")
        return await nap(rng)
    except EngineStopped as error:
        assert "back to a snapshot" in str(error)
        ask.check(outputs, aborted=False)
        return world.count("lost: restored")
    except ValueError as error:
        assert name and "in use" in str(error)
        return world.count("refused: id in use")
    assert outputs[-1].finished
    ask.check(outputs, aborted=outputs[0].request_id in world.aborted)
    world.count(f"ended: {outputs[-1].outputs[0].finish_reason}")


async def leave(world: World, rng: random.Random) -> None:
    """A client that goes before the end: breaks, closes, raises, or is cancelled."""
    ask, outputs, left = world.ask(rng), [], rng.randrange(4)
    name = rng.choice([*world.ids, *[None] * 6])

    async def take() -> None:
        async with aclosing(world.generate(ask, name)) as stream:
            async for output in stream:
                outputs.append(output)
                if len(outputs) > left and rng.random() < 0.5:
                    raise ZeroDivisionError

    async def drop() -> None:
        async for output in world.generate(ask, name):
            outputs.append(output)
            if len(outputs) > left:
                break

    task = asyncio.create_task(rng.choice([take, drop])())
    if rng.random() < 0.5:
        for _ in range(rng.randrange(4)):
            await nap(rng)
        task.cancel()
    try:
        await task
    except (asyncio.CancelledError, ZeroDivisionError, QueueFull) as error:
        world.count(f"left: {type(error).__name__}")
    except EngineStopped as error:
        assert "back to a snapshot" in str(error)
    except ValueError as error:
        assert name and "in use" in str(error)
    aborted = bool(outputs) and outputs[0].request_id in world.aborted
    ask.check(outputs, aborted=aborted)


async def abort(world: World, rng: random.Random) -> None:
    name = rng.choice(world.ids)
    world.abort_soon(name)
    if await world.engine.abort(name):
        world.count("aborts")


async def reset(world: World, rng: random.Random) -> None:
    await world.engine.reset_prefix_cache()


async def new_weights(world: World, rng: random.Random) -> None:
    """Another version of the same weights: answers are the same, and blocks are not."""
    engine = world.served.engine
    mode = rng.choice(["wait", "recompute", "keep"])
    if engine.config.batching == "static" and mode == "recompute":
        with pytest.raises(ValueError, match="static"):
            await world.engine.call(Engine.update_params, engine.params, mode)
    else:
        await world.engine.call(Engine.update_params, engine.params, mode)
        world.count(f"weights: {mode}")


async def release(world: World, rng: random.Random) -> None:
    """Take the KV memory away for a while."""
    try:
        await world.engine.call(Engine.release_kv)
        world.count("released")
    except RuntimeError as error:
        assert "static batch" in str(error)
    await nap(rng)
    await world.engine.call(Engine.restore_kv)


async def fork(world: World, rng: random.Random) -> None:
    """A fork with a client or without one: then its outputs go nowhere, and it ends by
    itself. What it is a fork of may be anything."""
    parent, name = rng.choice(world.ids), f"fork {rng.random()}"
    try:
        if rng.random() < 0.5:
            await world.engine.call(Engine.fork, parent, name)
            return world.count("forks")
        *_, last = [output async for output in world.engine.fork(parent, name)]
        assert last.finished and last.request_id == name
        world.check_fork(last)
        world.count("forks with a client")
    except QueueFull:
        world.count("refused: full")
    except EngineStopped as error:
        assert "back to a snapshot" in str(error)
    except ValueError as error:
        # It is not there, has all its tokens, or several samples.
        assert re.search("has not ended|has ended|already|must be 1", str(error))


async def go_back(world: World, rng: random.Random) -> None:
    """Take a snapshot, and now and then go back to it. Requests that it holds go on
    without a client."""
    try:
        snapshot = await world.engine.call(Engine.snapshot)
        world.count("snapshots")
    except RuntimeError as error:
        assert "release_kv" in str(error)
        return
    if rng.random() < 0.3:
        await nap(rng)
        await world.engine.call(Engine.restore, snapshot)


async def look(world: World, rng: random.Random) -> None:
    stats = await world.engine.stats()
    assert 0 <= stats["free_blocks"] <= stats["num_blocks"]


async def wrong_call(world: World, rng: random.Random) -> None:
    with pytest.raises(ZeroDivisionError):
        await world.engine.call(lambda engine: 1 / 0)


class Raises:
    """A sequence, by its own word."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, i):
        raise KeyError("hostile")


OK = {"prompt": [1, 2, 3]}
WRONG: list[Callable[[World], dict[str, Any]]] = [
    lambda w: {"prompt": []},
    lambda w: {"prompt": None},
    lambda w: {"prompt": 5},
    lambda w: {"prompt": b"abc"},
    lambda w: {"prompt": ""},
    lambda w: {"prompt": "\ud800"},
    lambda w: {"prompt": "abc"},  # letters that the tokenizer does not know
    lambda w: {"prompt": [97]},
    lambda w: {"prompt": [-1]},
    lambda w: {"prompt": [True]},
    lambda w: {"prompt": [1.0]},
    lambda w: {"prompt": ["1"]},
    lambda w: {"prompt": [[1]]},
    lambda w: {"prompt": [None]},
    lambda w: {"prompt": [2**70]},
    lambda w: {"prompt": {1, 2}},
    lambda w: {"prompt": (i for i in range(3))},
    lambda w: {"prompt": np.array(5)},
    lambda w: {"prompt": np.array([[1, 2]])},
    lambda w: {"prompt": np.array([1.0])},
    lambda w: {"prompt": np.array([], np.int32)},
    lambda w: {"prompt": Raises()},
    lambda w: {"prompt": {}},
    lambda w: {"prompt": {"prompt": [1]}},
    lambda w: {"prompt": {"prompt_token_ids": "abc"}},
    lambda w: {"prompt": {"prompt_token_ids": [1], 3: 1}},
    lambda w: {"prompt": {"prompt_token_ids": [1], "cache_salt": ""}},
    lambda w: {"prompt": [1] * w.served.engine.config.max_model_len},
    lambda w: {"prompt": [1] * 100_000},
    lambda w: OK | {"sampling_params": {}},
    lambda w: OK | {"sampling_params": {"max_tokens": 3}},
    lambda w: OK | {"sampling_params": SamplingParams},
    lambda w: OK | {"sampling_params": SamplingParams(logprobs=2_000)},
    lambda w: OK | {"sampling_params": SamplingParams(stop_token_ids=[97])},
    lambda w: OK | {"sampling_params": SamplingParams(stop_token_ids=range(40))},
    lambda w: OK | {"request_id": ""},
    lambda w: OK | {"request_id": 5},
    lambda w: OK | {"request_id": ["a"]},
    lambda w: OK | {"request_id": b"a"},
    lambda w: OK | {"priority": 0.5},
    lambda w: OK | {"priority": None},
    lambda w: OK | {"priority": 2**31},
    lambda w: OK | {"priority": True},
    lambda w: OK | {"user": 5},
    lambda w: OK | {"user": b"ann"},
    lambda w: OK | {"deadline_s": math.nan},
    lambda w: OK | {"deadline_s": "soon"},
    lambda w: OK | {"deadline_s": 10**400},
    lambda w: OK | {"arrival_time": math.inf},
    lambda w: OK | {"arrival_time": 1j},
    lambda w: OK | {"tags": ["a"]},
    lambda w: OK | {"tags": {"a": 1}},
    lambda w: OK | {"cache_salt": ""},
    lambda w: OK | {"cache_salt": 5},
    lambda w: OK | {"cache_salt": "\ud800"},
]


async def wrong(world: World, rng: random.Random) -> None:
    """A request that cannot be served is refused, or hits the bound before."""
    terms = rng.choice(WRONG)(world)
    try:
        async for _ in world.engine.generate(**terms):
            raise AssertionError(f"{terms} was served")
    except (ValueError, QueueFull) as error:
        world.count(f"refused: {type(error).__name__}")


async def wrong_params(world: World, rng: random.Random) -> None:
    field, value = rng.choice(
        [
            ("temperature", math.nan),
            ("temperature", -1),
            ("top_p", 2),
            ("max_tokens", 0),
            ("max_tokens", 1.5),
            ("min_tokens", -1),
            ("stop", [""]),
            ("stop", 5),
            ("stop_token_ids", [-1]),
            ("seed", 2**64),
            ("output_kind", "deltas"),
            ("ignore_eos", 1),
        ]
    )
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


Action = Callable[[World, random.Random], Awaitable[None]]
ACTIONS: dict[Action, int] = {
    take_all: 10,
    leave: 5,
    wrong: 5,
    abort: 3,
    look: 1,
    reset: 1,
    new_weights: 1,
    release: 1,
    fork: 2,
    go_back: 1,
    wrong_call: 1,
    wrong_params: 1,
}


# Runs ---------------------------------------------------------------------------------


async def client(world: World, seed: str, actions: int) -> None:
    rng = random.Random(seed)
    for _ in range(actions):
        (act,) = rng.choices(list(ACTIONS), list(ACTIONS.values()))
        await act(world, rng)
        if rng.random() < 0.3:
            await nap(rng)


async def check_the_end(world: World) -> None:
    """Nobody is left, so nothing is held but what is cached, and that can be freed."""
    engine, inner = world.engine, world.served.recorder.inner
    while await engine.call(Engine.has_unfinished_requests):  # forks have no client
        await asyncio.sleep(0.001)
    await engine.call(Engine.settle_tiers)
    await engine.call(lambda _: world.served.check_nothing_is_left())
    stats = await engine.stats()
    assert stats["free_blocks"] + stats["cached_blocks"] == stats["num_blocks"]
    await engine.reset_prefix_cache()
    await engine.call(Engine.settle_tiers)
    stats = await engine.stats()
    assert stats["free_blocks"] == stats["num_blocks"]
    assert stats["host_blocks"] == stats["disk_blocks"] == 0
    if hasattr(inner, "free"):
        assert len(inner.free) == stats["num_blocks"]
    world.seen["preemptions"] += int(stats["preemptions"])
    await engine.close()


def fuzz(
    seed: int, folder: Path, *, threads: int = 3, tasks: int = 6, actions: int = 10
) -> collections.Counter[str]:
    """Let clients loose on an engine; what happened, by kind."""
    world = World(seed, folder)
    failed: list[BaseException] = []

    async def clients(thread: int) -> None:
        seeds = [f"{seed} {thread} {task}" for task in range(tasks)]
        await asyncio.gather(*(client(world, s, actions) for s in seeds))

    def run(thread: int) -> None:
        try:
            asyncio.run(clients(thread))
        except BaseException as error:
            failed.append(error)

    running = [threading.Thread(target=run, args=(i,)) for i in range(threads)]
    for thread in running:
        thread.start()
    end_s = time.monotonic() + LIMIT_S
    for thread in running:
        thread.join(max(end_s - time.monotonic(), 0.0))
    if any(thread.is_alive() for thread in running):
        faulthandler.dump_traceback()
        raise AssertionError(f"seed {seed}: somebody waits for ever")
    if failed:
        raise AssertionError(f"seed {seed} of tests/engine/test_async_fuzz.py") from (
            failed[0]
        )
    asyncio.run(asyncio.wait_for(check_the_end(world), LIMIT_S))
    return world.seen


EXPECTED = (
    "ended: length",
    "ended: stop",
    "ended: abort",
    "aborts",
    "aborts by a callback",
    "left: CancelledError",
    "left: ZeroDivisionError",
    "refused: ValueError",
    "refused: full",
    "refused: id in use",
    "weights: keep",
    "weights: wait",
    "released",
    "forks",
    "forks with a client",
    "forks checked",
    "snapshots",
    "lost: restored",
    "preemptions",
)


def test_random_clients_get_their_answers_or_their_errors(tmp_path: Path) -> None:
    seen: collections.Counter[str] = collections.Counter()
    for seed in range(1, 10):
        seen += fuzz(seed, tmp_path / f"{seed % 3}")
    assert {what for what in EXPECTED if not seen[what]} == set()


@pytest.mark.fuzz
def test_random_clients_for_minutes(tmp_path: Path) -> None:
    end_s, seed = time.monotonic() + 300, 1000
    while time.monotonic() < end_s:
        fuzz(seed, tmp_path / f"{seed % 3}", threads=4, tasks=8, actions=20)
        seed += 1
