"""AsyncEngine: many clients on one engine, what each of them gets, and who is told when
it stops.

Nothing here is judged by time: what would hang runs into `LIMIT_S`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from jaxserve import (
    AsyncEngine,
    Engine,
    EngineStopped,
    QueueFull,
    RequestOutput,
    SamplingParams,
)
from jaxserve.outputs import joined
from jaxserve.scheduling.policies import fcfs
from tests.engine.harness import JAX, Served, by_priority, config, jax_executor
from tests.engine.test_cases_tiers import PROMPT, THROUGH, faulty, on_disk
from tests.models.test_tokenizer import HI, WITH_BOS, directory
from tests.serving import Job, direct, greedy, workload

LIMIT_S = 120.0
SMALL = config(4, 2, 2, max_num_seqs=4, num_blocks=24, num_swap_blocks=10)
# On it a request without max_tokens goes on for minutes: it has not ended yet.
LONG = config(16, 2, 2, max_num_seqs=4, max_model_len=20_000, num_blocks=1300)
A, B = list(range(1, 10)), [5, 6, 7, 8, 9]
KINDS = ("cumulative", "delta", "final_only")


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run to the end, in a loop that complains of what nobody awaited."""

    async def limited():
        return await asyncio.wait_for(coroutine, LIMIT_S)

    return asyncio.run(limited())


async def collect(outputs: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in outputs]


def whole(outputs: Sequence[RequestOutput], kind: str) -> RequestOutput:
    """All that the outputs of a request tell; they must be well-formed."""
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [
        True
    ]
    last = outputs[0]
    for output in outputs[1:]:
        had, new = last.outputs[0].token_ids, output.outputs[0].token_ids
        if kind == "delta":
            last = joined(last, output)
            continue
        assert kind == "cumulative" and new[: len(had)] == had
        last = output
    return last


async def serve(engine: AsyncEngine, job: Job) -> None:
    """One client; its answer must be the direct computation's."""
    outputs = engine.generate(
        job.prompt, job.params, priority=job.priority, cache_salt=job.salt
    )
    last = whole(await collect(outputs), job.output_kind)
    assert last.outputs[0].token_ids == job.expected()
    assert last.outputs[0].finish_reason == "length"


async def settled(engine: AsyncEngine) -> dict[str, int | float]:
    """The counters of an engine that must have nothing left."""
    await engine.call(Engine.settle_tiers)
    assert await engine.call(Engine.holds_nothing)
    stats = await engine.stats()
    assert stats["free_blocks"] + stats["cached_blocks"] == stats["num_blocks"]
    assert stats["running"] == stats["waiting"] == 0
    return stats


async def until(condition: Callable[[], Coroutine[Any, Any, bool]]) -> None:
    while not await condition():
        await asyncio.sleep(0.001)


# Prompts ------------------------------------------------------------------------------


def test_li5_a_conversation_has_one_bos_through_each_door(tmp_path: Path) -> None:
    """LI5 (vllm#55288): what one door sent was not what another did."""
    tokenizer = directory(tmp_path, template=WITH_BOS)
    ids = [0, ord("h") - 30, ord("i") - 30, 1]
    assert tokenizer.apply_chat_template(HI) == ids  # as LLM.chat does

    async def main() -> None:
        engine = AsyncEngine(Served(SMALL, tokenizer=tokenizer).engine, tokenizer)
        async with engine:
            doors = [
                engine.chat(HI, greedy(2)),
                engine.generate("<s>hi</s>", greedy(2)),
                engine.generate(ids, greedy(2)),
                engine.generate({"prompt_token_ids": ids}, greedy(2)),
            ]
            for outputs in [await collect(door) for door in doors]:
                assert outputs[-1].prompt_token_ids == ids
                assert outputs[-1].outputs[0].token_ids == direct(ids, 2)
            (*_, last) = await collect(engine.generate("hi", greedy(2)))
            assert last.prompt_token_ids == ids[:3]  # the tokenizer adds one

    run(main())


# Many clients -------------------------------------------------------------------------


def test_hundreds_of_clients_get_their_own_answers() -> None:
    async def main() -> None:
        jobs = workload(1, 400, kinds=True)
        async with AsyncEngine(Served(SMALL, policy=by_priority()).engine) as engine:
            await asyncio.gather(*(serve(engine, job) for job in jobs))
            stats = await settled(engine)
        assert stats["preemptions"] > 0

    run(main())


def test_clients_of_several_threads_and_event_loops() -> None:
    engine = AsyncEngine(Served(SMALL, policy=by_priority()).engine)
    failed: list[BaseException] = []

    async def clients(seed: int) -> None:
        await asyncio.gather(
            *(serve(engine, job) for job in workload(seed, 40, kinds=True))
        )

    def thread(seed: int) -> None:
        try:
            run(clients(seed))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=thread, args=(seed,)) for seed in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(LIMIT_S)
    assert not failed and not any(one.is_alive() for one in threads)
    run(settled(engine))
    run(engine.close())


def test_on_a_device_too() -> None:
    async def main() -> None:
        served = Served(
            dataclasses.replace(JAX, num_blocks=64, launches_in_flight=2),
            executor=jax_executor(cost=None),
        )
        async with AsyncEngine(served.engine) as engine:
            await asyncio.gather(
                *(serve(engine, job) for job in workload(2, 60, kinds=True))
            )
            await settled(engine)

    run(main())


# Bad input ----------------------------------------------------------------------------

BAD = {
    "no tokens": ([], {}, "at least one token"),
    "a text without a tokenizer": ("Hello", {}, "no tokenizer"),
    "no prompt": (None, {}, "must be a sequence"),
    "a key": ({"prompt_token_ids": [1], "colour": 1}, {}, "colour"),
    "a token": ([97], {}, r"prompt_token_ids\[0\]=97"),
    "a long prompt": ([1] * 64, {}, "max_model_len=64"),
    "parameters": (A, {"sampling_params": 5}, "must be SamplingParams"),
    "log-probabilities": (
        A,
        {"sampling_params": SamplingParams(logprobs=9)},
        "max_logprobs=0",
    ),
    "an id": (A, {"request_id": 5}, "request_id=5"),
    "an id in use": (A, {"request_id": "good"}, "in use"),
    "a priority": (A, {"priority": 0.5}, "priority=0.5"),
    "a deadline": (A, {"deadline_s": float("nan")}, "deadline_s=nan"),
    "an arrival": (A, {"arrival_time": "now"}, "arrival_time='now'"),
    "a salt": (A, {"cache_salt": ""}, "cache_salt=''"),
    "two salts": (
        {"prompt_token_ids": A, "cache_salt": "a"},
        {"cache_salt": "b"},
        "cache_salt='b'",
    ),
    "tags": (A, {"tags": {1: 2}}, "tags="),
    "a user": (A, {"user": 7}, "user=7"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_is_its_callers_alone(kind: str) -> None:
    prompt, terms, complaint = BAD[kind]

    async def main() -> None:
        async with AsyncEngine(Served(SMALL).engine) as engine:
            gate = threading.Event()
            held = asyncio.create_task(engine.call(lambda e: gate.wait(LIMIT_S)))
            await asyncio.sleep(0)
            good = asyncio.create_task(
                collect(engine.generate(B, greedy(30, output_kind="delta"), "good"))
            )
            await asyncio.sleep(0)
            bad = asyncio.create_task(collect(engine.generate(prompt, **terms)))
            await asyncio.sleep(0)
            gate.set()
            with pytest.raises(ValueError, match=complaint):
                await bad
            last = whole(await good, "delta")
            assert last.outputs[0].token_ids == direct(B, 30)
            assert await held
            await settled(engine)

    run(main())


def test_objects_that_raise_are_their_callers_alone() -> None:
    class Hostile(dict):
        def items(self):
            raise KeyError("hostile")

    async def main() -> None:
        async with AsyncEngine(Served(SMALL).engine) as engine:
            with pytest.raises(KeyError, match="hostile"):
                await collect(engine.generate(A, greedy(3), tags=Hostile(a="b")))
            (last,) = await collect(
                engine.generate(A, greedy(3, output_kind="final_only"))
            )
            assert last.outputs[0].token_ids == direct(A, 3)
            await settled(engine)

    run(main())


@pytest.mark.parametrize("value", [-1, 1.0, True, "1"])
def test_a_bad_bound_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="max_waiting="):
        AsyncEngine(Served(SMALL).engine, max_waiting=value)  # type: ignore[arg-type]


# Leaving ------------------------------------------------------------------------------


async def leave_by_break(engine: AsyncEngine) -> None:
    async for _ in engine.generate(A, greedy(None), "r"):
        break
    gc.collect()  # CPython needs none; other Pythons do
    for _ in range(3):  # the loop makes a task of closing it, and runs that
        await asyncio.sleep(0)


async def leave_by_aclose(engine: AsyncEngine) -> None:
    async with aclosing(engine.generate(A, greedy(None), "r")) as outputs:
        async for _ in outputs:
            break


async def leave_by_error(engine: AsyncEngine) -> None:
    with pytest.raises(ZeroDivisionError):
        async with aclosing(engine.generate(A, greedy(None), "r")) as outputs:
            async for _ in outputs:
                raise ZeroDivisionError


async def leave_by_cancel(engine: AsyncEngine) -> None:
    task = asyncio.create_task(collect(engine.generate(A, greedy(None), "r")))
    await until(lambda: engine.call(lambda e: e.stats()["running"] > 0))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_at_once(engine: AsyncEngine) -> None:
    task = asyncio.create_task(collect(engine.generate(A, greedy(None), "r")))
    await asyncio.sleep(0)  # as far as the first output
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    "leave",
    [
        leave_by_break,
        leave_by_aclose,
        leave_by_error,
        leave_by_cancel,
        leave_at_once,
    ],
)
def test_who_leaves_gives_all_back(
    leave: Callable[[AsyncEngine], Coroutine[Any, Any, None]],
) -> None:
    """The id is free at once, and its next user sees nothing of the last."""

    async def main() -> None:
        served = Served(LONG)
        async with AsyncEngine(served.engine) as engine:
            mate = asyncio.create_task(serve(engine, Job(B, 40)))
            for i in range(10):
                await leave(engine)
                outputs = engine.generate([i], greedy(3, output_kind="delta"), "r")
                last = whole(await collect(outputs), "delta")
                assert last.outputs[0].token_ids == direct([i], 3)
            await mate
            await settled(engine)
        ended = [e.data["reason"] for e in served.of("finished", "r")]
        assert ended == ["abort", "length"] * 10

    run(main())


def test_who_leaves_late_does_not_abort_the_next_of_the_same_id() -> None:
    """Its request has ended, though it has not seen that yet."""

    async def main() -> None:
        async with AsyncEngine(Served(LONG).engine) as engine:
            old = engine.generate(A, greedy(9), "r")
            await anext(old)
            await until(lambda: engine.call(Engine.holds_nothing))
            new = engine.generate(B, greedy(None), "r")
            await anext(new)
            await old.aclose()
            assert await engine.call(lambda e: e.get_num_unfinished_requests()) == 1
            assert not (await anext(new)).finished
            await new.aclose()
            await settled(engine)

    run(main())


def test_a_generator_that_is_never_asked_submits_nothing() -> None:
    async def main() -> None:
        served = Served(LONG)
        async with AsyncEngine(served.engine) as engine:
            await engine.generate(A, greedy(None), "r").aclose()
            await settled(engine)
        assert not served.of("arrived")

    run(main())


@pytest.mark.parametrize("kind", KINDS)
def test_an_abort_ends_the_stream_with_what_it_has(kind: str) -> None:
    async def main() -> None:
        async with AsyncEngine(Served(LONG).engine) as engine:
            params = greedy(None, output_kind=kind)
            task = asyncio.create_task(collect(engine.generate(A, params, "r")))
            await until(lambda: engine.call(lambda e: e.stats()["output_tokens"] > 3))
            assert await engine.abort("r")
            assert not await engine.abort("r")
            made = await engine.call(lambda e: e.stats()["output_tokens"])
            again = engine.generate(B, greedy(4), "r")
            last = whole(await task, kind).outputs[0]
            assert last.finish_reason == "abort"
            assert last.token_ids == direct(A, len(last.token_ids))
            assert 3 < len(last.token_ids) <= made
            assert (await collect(again))[-1].outputs[0].token_ids == direct(B, 4)
            await settled(engine)

    run(main())


def test_a_loop_that_dies_leaves_no_request_behind() -> None:
    """A loop that is closed with its clients in it cancels nothing."""
    served = Served(LONG)
    engine = AsyncEngine(served.engine)
    loop = asyncio.new_event_loop()
    outputs = engine.generate(A, greedy(None), "r")
    loop.run_until_complete(anext(outputs))
    loop.close()
    run(until(lambda: engine.call(Engine.holds_nothing)))
    run(engine.close())
    assert [e.data["reason"] for e in served.of("finished")] == ["abort"]
    del outputs


# Slow consumers, and many -------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_consumer_holds_one_output_and_nobody_up(kind: str) -> None:
    async def main() -> None:
        async with AsyncEngine(Served(SMALL).engine) as engine:
            slow = engine.generate(A, greedy(50, output_kind=kind), "slow")
            got = [await anext(slow)]
            await asyncio.gather(
                *(serve(engine, job) for job in workload(3, 30, kinds=True))
            )
            await until(lambda: engine.call(Engine.holds_nothing))
            # All has been made, and none of it was taken but the first; on a machine
            # that is busy enough, the first may be all.
            if not got[-1].finished:
                got += await collect(slow)
            assert len(got) <= (1 if kind == "final_only" else 2)
            assert whole(got, kind).outputs[0].token_ids == direct(A, 50)

    run(main())


def test_too_many_are_refused_at_once_and_later_taken() -> None:
    async def main() -> None:
        served = Served(dataclasses.replace(SMALL, max_num_seqs=2))
        gate = threading.Event()
        async with AsyncEngine(served.engine, max_waiting=1) as engine:
            held = asyncio.create_task(engine.call(lambda e: gate.wait(LIMIT_S)))
            await asyncio.sleep(0)
            tasks = [asyncio.create_task(serve(engine, Job(A, 5))) for _ in range(6)]
            await asyncio.sleep(0)
            gate.set()  # all have asked before any is served
            assert await held
            for task in tasks[:3]:
                await task
            for task in tasks[3:]:
                with pytest.raises(QueueFull, match="max_num_seqs=2.*max_waiting=1"):
                    await task
            await serve(engine, Job(B, 5))
            await settled(engine)

    run(main())


# Waiting ------------------------------------------------------------------------------


def test_an_idle_engine_sleeps() -> None:
    async def main() -> None:
        engine = Served(SMALL).engine
        steps, step = 0, engine.step

        def counted() -> list[RequestOutput]:
            nonlocal steps
            steps += 1
            return step()

        engine.step = counted  # type: ignore[method-assign]
        async with AsyncEngine(engine) as front:
            for _ in range(3):
                await serve(front, Job(A, 5))
                await settled(front)
                before = steps
                await asyncio.sleep(0.05)
                assert steps <= before + 1  # that of the last order

    run(main())


def wall_clock() -> Engine:
    return Served(JAX, executor=jax_executor(cost=None)).engine


def test_a_request_need_not_wait_for_one_of_the_future() -> None:
    async def main() -> None:
        async with AsyncEngine(wall_clock()) as engine:
            far = engine.now() + 1e6
            later = asyncio.create_task(
                collect(engine.generate(A, greedy(5), "later", arrival_time=far))
            )
            await until(lambda: engine.call(lambda e: e.has_unfinished_requests()))
            for _ in range(20):
                await serve(engine, Job(B, 5))
                await asyncio.sleep(0.002)  # the engine sleeps until then
            assert not later.done() and await engine.abort("later")
            (last,) = await later
            assert last.outputs[0].finish_reason == "abort"
            near = engine.now() + 0.05
            made = await collect(engine.generate(A, greedy(5), arrival_time=near))
            assert made[-1].outputs[0].token_ids == direct(A, 5)
            assert made[0].metrics.arrival_s == near
            assert (made[0].metrics.ttft_s or 0) > 0
            await settled(engine)

    run(main())


def test_a_request_need_not_wait_for_anothers_load(tmp_path: Path) -> None:
    """The disk hangs; who waits for it does, and nobody else."""
    first = on_disk(tmp_path)
    first.run("a", PROMPT, 1)
    first.engine.close()
    stuck = threading.Event()

    def hang() -> None:
        assert stuck.wait(LIMIT_S)

    shape = dataclasses.replace(THROUGH, transfer_timeout_s=1e5, tier_write="never")

    async def main() -> None:
        async with AsyncEngine(faulty(tmp_path, shape, hang).engine) as engine:
            waits = asyncio.create_task(serve(engine, Job(PROMPT, 8)))
            for _ in range(20):
                await serve(engine, Job(B, 5))
                await asyncio.sleep(0.002)  # the engine waits for the load
            assert not waits.done()
            stuck.set()
            await waits
            assert (await settled(engine))["disk_hits_tokens"] == 16

    run(main())


# Calls --------------------------------------------------------------------------------


def test_a_call_runs_between_steps_and_its_error_is_its_callers() -> None:
    def fail(engine: Engine, error: BaseException) -> None:
        raise error

    async def main() -> None:
        async with AsyncEngine(Served(SMALL).engine) as engine:
            mates = [
                asyncio.create_task(serve(engine, j))
                for j in workload(4, 20, kinds=True)
            ]
            for _ in range(20):
                name = await engine.call(lambda e: threading.current_thread().name)
                assert name == "jaxserve-engine"
                await engine.reset_prefix_cache()
            with pytest.raises(ZeroDivisionError):
                await engine.call(fail, ZeroDivisionError())
            with pytest.raises(RuntimeError, match="StopIteration"):
                await engine.call(fail, StopIteration())
            with pytest.raises(TypeError):
                await engine.call(Engine.abort_request, "a", "b")  # type: ignore[call-arg]
            await asyncio.gather(*mates)
            await settled(engine)

    run(main())


def test_requests_wait_while_the_kv_memory_is_released() -> None:
    async def main() -> None:
        async with AsyncEngine(Served(LONG).engine) as engine:
            runs = engine.generate(A, greedy(None, output_kind="delta"), "runs")
            got = [await anext(runs)]
            await engine.call(Engine.release_kv)
            comes = asyncio.create_task(serve(engine, Job(B, 5)))
            left = asyncio.create_task(collect(engine.generate(B, greedy(5), "left")))
            await until(
                lambda: engine.call(lambda e: e.get_num_unfinished_requests() == 3)
            )
            assert await engine.abort("left")
            (last,) = await left
            assert last.outputs[0].finish_reason == "abort"
            assert not comes.done()
            await engine.call(Engine.restore_kv)
            await comes
            got += [await anext(runs) for _ in range(3)]
            sent = [token for output in got for token in output.outputs[0].token_ids]
            assert sent == direct(A, len(sent))
            await runs.aclose()
            await settled(engine)
            await engine.call(Engine.release_kv)

    run(main())


def test_a_restored_engine_tells_those_whose_requests_it_forgets() -> None:
    async def main() -> None:
        async with AsyncEngine(Served(LONG).engine) as engine:
            await serve(engine, Job(A, 5))
            earlier = engine.generate(A, greedy(None), "earlier")
            await anext(earlier)
            snapshot = await engine.call(Engine.snapshot)
            later = engine.generate(B, greedy(None), "later")
            await anext(later)
            await engine.call(Engine.restore, snapshot)
            for outputs in (earlier, later):
                with pytest.raises(EngineStopped, match="back to a snapshot"):
                    await collect(outputs)
            await serve(engine, Job(B, 5))
            assert not await engine.abort("later")
            assert await engine.abort("earlier")  # it goes on, and nobody hears of it
            await settled(engine)

    run(main())


def test_a_call_that_is_cancelled_does_not_run() -> None:
    async def main() -> None:
        gate, ran = threading.Event(), []
        async with AsyncEngine(Served(SMALL).engine) as engine:
            blocks = asyncio.create_task(engine.call(lambda e: gate.wait(LIMIT_S)))
            task = asyncio.create_task(engine.call(lambda e: ran.append(1)))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.sleep(0)
            gate.set()
            assert await blocks
            await settled(engine)
        assert task.cancelled() and not ran

    run(main())


# The end ------------------------------------------------------------------------------


async def all_told(engine: AsyncEngine, complaint: str) -> None:
    """Everybody who asks is told why."""
    asked = (collect(engine.generate(A, greedy(3))), engine.stats(), engine.abort("r"))
    for one in asked:
        with pytest.raises(EngineStopped, match=complaint):
            await one
    with pytest.raises(EngineStopped):
        await engine.reset_prefix_cache()


def test_an_engine_that_breaks_tells_everybody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def rank(state, view, now_s):  # a policy that takes a deadline for granted
        return 0, (-view.deadline_s, view.index)

    async def main() -> None:
        served = Served(SMALL, policy=fcfs()._replace(rank=rank))
        async with AsyncEngine(served.engine) as engine:
            clients = [
                collect(engine.generate(A, greedy(50), deadline_s=9.0))
                for _ in range(30)
            ]
            clients.append(collect(engine.generate(A, greedy(50))))
            gate = threading.Event()
            calls = [engine.call(lambda e: gate.wait(LIMIT_S)), engine.stats()]
            tasks = [asyncio.create_task(c) for c in (*clients, *calls)]
            await asyncio.sleep(0)
            gate.set()
            for task in tasks[:31]:
                with pytest.raises(EngineStopped, match="has stopped.*unary -") as told:
                    await task
                assert isinstance(told.value.__cause__, RuntimeError)
            await asyncio.wait(tasks)
            await all_told(engine, "has stopped.*unary -")

    with caplog.at_level(logging.CRITICAL):
        run(main())


def test_a_callback_that_raises_stops_the_engine() -> None:
    async def main() -> None:
        served = Served(SMALL)

        def on_event(event) -> None:
            if event.kind == "progressed" and event.request_id == "r":
                raise ZeroDivisionError

        served.engine._reports._on_event = on_event
        async with AsyncEngine(served.engine) as engine:
            mate = asyncio.create_task(collect(engine.generate(B, greedy(50))))
            with pytest.raises(EngineStopped, match="ZeroDivisionError"):
                await collect(engine.generate(A, greedy(None), "r"))
            with pytest.raises(EngineStopped, match="ZeroDivisionError"):
                await mate
            await all_told(engine, "ZeroDivisionError")

    run(main())


def test_what_had_come_is_told_before_the_error() -> None:
    async def main() -> None:
        served, broken = Served(LONG), False

        def result(ticket):
            if broken:
                raise ZeroDivisionError
            return real(ticket)

        real = served.recorder.inner.result
        served.recorder.inner.result = result
        async with AsyncEngine(served.engine) as engine:
            outputs = engine.generate(A, greedy(None, output_kind="delta"), "r")
            got = [await anext(outputs)]
            await until(lambda: engine.call(lambda e: e.stats()["output_tokens"] > 9))
            broken = True
            with pytest.raises(EngineStopped, match="ZeroDivisionError"):
                async for output in outputs:
                    got.append(output)
            sent = [token for output in got for token in output.outputs[0].token_ids]
            assert sent == direct(A, len(sent)) and len(sent) > 9

    run(main())


def test_a_close_ends_every_stream_and_saves_the_cache(tmp_path: Path) -> None:
    async def main() -> None:
        shape = dataclasses.replace(THROUGH, tier_write="on_eviction")
        engine = AsyncEngine(on_disk(tmp_path, shape, cost=None).engine)
        tasks = [
            asyncio.create_task(
                collect(engine.generate(PROMPT, greedy(30, output_kind=kind)))
            )
            for kind in KINDS * 6
        ]
        await until(lambda: engine.call(lambda e: e.stats()["output_tokens"] > 20))
        await asyncio.gather(engine.close(), engine.close())
        for task, kind in zip(tasks, KINDS * 6, strict=True):
            last = whole(await task, kind).outputs[0]
            assert last.finish_reason in ("abort", "length")
            assert last.token_ids == direct(PROMPT, 30)[: len(last.token_ids)]
        await all_told(engine, "the engine was closed")
        await engine.close()

    run(main())
    again = on_disk(tmp_path)
    assert again.run("again", PROMPT, 3).num_cached_tokens == 16


def test_a_program_that_forgets_to_close_ends() -> None:
    script = (
        "import asyncio\n"
        "from jaxserve import AsyncEngine\n"
        "from tests.engine.harness import JAX, Served, jax_executor\n"
        "from tests.serving import greedy\n"
        "engine = AsyncEngine(Served(JAX, executor=jax_executor(cost=None)).engine)\n"
        "async def main():\n"
        "    far = engine.now() + 1e6\n"
        "    later = engine.generate([1], greedy(5), arrival_time=far)\n"
        "    task = asyncio.create_task(anext(later))\n"
        "    async for output in engine.generate([1, 2], greedy(5)):\n"
        "        print(output.outputs[0].token_ids, flush=True)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(direct([1, 2], 5))
    assert not done.stderr
