"""AsyncEngine.fork: a stream of its own, and nothing of another's."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from typing import Any

import pytest

from jaxserve import AsyncEngine, Engine, QueueFull, SamplingParams
from jaxserve.core import Event
from tests.engine.harness import Served, config
from tests.engine.test_async_engine import (
    KINDS,
    LIMIT_S,
    LONG,
    A,
    B,
    collect,
    run,
    settled,
    until,
    whole,
)
from tests.serving import direct, greedy, sampled


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inherits", [True, False])
def test_a_fork_has_a_stream_of_its_own(kind: Any, inherits: bool) -> None:
    async def main() -> None:
        async with AsyncEngine(Served(LONG).engine) as engine:
            params = SamplingParams(
                temperature=1.0, seed=3, max_tokens=2000, output_kind=kind
            )
            parent = asyncio.create_task(collect(engine.generate(A, params, "a")))
            await until(lambda: engine.call(_runs, "a"))
            await engine.call(Engine.release_kv)  # so that nobody goes on
            had = await engine.call(_output, "a")
            theirs = dataclasses.replace(params, max_tokens=len(had) + 5)
            fork = engine.fork("a", "b", None if inherits else theirs)
            taken = asyncio.create_task(collect(fork))
            await until(lambda: engine.call(lambda e: "b" in e._clients.live))
            await engine.call(Engine.restore_kv)
            told = whole(await taken, kind)
            n = 2000 if inherits else len(had) + 5
            assert told.request_id == "b" and len(had) < n
            assert told.outputs[0].token_ids == sampled(A, had, n, 3, 1)
            told = whole(await parent, kind)
            assert told.outputs[0].token_ids == sampled(A, [], 2000, 3, 0)
            await settled(engine)

    run(main())


def test_who_leaves_a_fork_leaves_its_parent_alone() -> None:
    async def main() -> None:
        async with AsyncEngine(Served(LONG).engine, max_waiting=0) as engine:
            parent = engine.generate(A, greedy(None), "a")
            await anext(parent)
            forks = [engine.fork("a") for _ in range(3)]
            for fork in forks:
                tokens = (await anext(fork)).outputs[0].token_ids
                assert tokens == direct(A, len(tokens))
            with pytest.raises(QueueFull, match="4 requests have not ended"):
                await anext(engine.fork("a"))
            for fork in forks:
                await fork.aclose()
            for request_id, new_id in (("nobody", "b"), ("a", "a")):
                with pytest.raises(ValueError, match="has not ended"):
                    await anext(engine.fork(request_id, new_id))
            assert not (await anext(parent)).finished
            await parent.aclose()
            await settled(engine)

    run(main())


def test_who_ends_while_a_fork_is_made_is_told_before_the_id_is_used_again() -> None:
    shape = config(16, 2, 4, max_num_seqs=4, max_model_len=2000, num_blocks=600)

    async def main() -> None:
        served = Served(shape)
        loop, asked = asyncio.get_running_loop(), threading.Event()
        asks, tasks = [], []
        async with AsyncEngine(served.engine) as engine:

            async def ask() -> None:
                """A fork, and right behind it the id of one that will have ended."""
                both = engine.fork("a", "fork"), engine.generate(B, greedy(3), "b")
                for outputs in both:
                    tasks.append(asyncio.create_task(collect(outputs)))
                    await asyncio.sleep(0)
                asked.set()

            def on_event(event: Event) -> None:
                # What is left of b is in the next launch, which is in flight.
                if (event.request_id, event.kind) == ("b", "progressed") and not asks:
                    asks.append(asyncio.run_coroutine_threadsafe(ask(), loop))
                    assert asked.wait(LIMIT_S)

            served.engine._reports._on_event = on_event
            parent = engine.generate(A, greedy(None), "a")
            await anext(parent)
            first = (await collect(engine.generate(A, greedy(6), "b")))[-1]
            assert first.outputs[0].token_ids == direct(A, 6)
            second = (await tasks[1])[-1]
            assert second.outputs[0].token_ids == direct(B, 3)
            await parent.aclose()
            assert await engine.abort("fork")
            await tasks[0]
            await settled(engine)

    run(main())


def _output(engine: Engine, name: str) -> list[int]:
    return list(engine._clients.live[name].lives[0].request.output)


def _runs(engine: Engine, name: str) -> bool:
    return name in engine._clients.live and len(_output(engine, name)) >= 3
