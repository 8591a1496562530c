"""AsyncEngine: an engine on a thread of its own, for asyncio programs.

Owns how requests come in and who is refused. The thread is `engine_thread`'s, and the
engine knows nothing of it. Never sees a plan, a block or a launch.
"""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from jaxserve import validation
from jaxserve.engine import Engine
from jaxserve.engine_thread import EngineStopped as EngineStopped
from jaxserve.engine_thread import EngineThread
from jaxserve.llm import LLM
from jaxserve.models.tokenizer import Tokenizer
from jaxserve.outputs import RequestOutput
from jaxserve.prompts import Message, Prompt, needed, read, render
from jaxserve.sampling_params import SamplingParams
from jaxserve.streams import Stream

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class QueueFull(RuntimeError):
    """As many requests wait as may; this one was not taken in."""


class AsyncEngine:
    """Serves many asyncio clients with one engine.

    Its methods may be used from any number of event loops and threads at the same time.
    An engine that breaks, or whose `on_event` raises, ends every stream and call with
    `EngineStopped`, and so do later ones.

    Args:
      engine: to be used by nobody else from now on. Its `on_event` is called on the
        engine's thread, and delays every request.
      tokenizer: turns prompts into token ids; None takes token ids only. The text of
        outputs comes from the engine's own.
      max_waiting: how many requests may be unfinished beside the max_num_seqs that can
        run; `generate` refuses more. None is no bound.

    Use it as `async with AsyncEngine(...) as engine`, or `close` it.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None = None,
        *,
        max_waiting: int | None = None,
    ):
        whole = isinstance(max_waiting, int) and not isinstance(max_waiting, bool)
        if max_waiting is not None and not (whole and max_waiting >= 0):
            raise ValueError(
                f"max_waiting={max_waiting!r} must be an integer >= 0, or None for no "
                "bound"
            )
        self._engine = engine
        self._tokenizer = tokenizer
        self._max_waiting = max_waiting
        self._thread = EngineThread(engine)

    @classmethod
    def from_checkpoint(
        cls, model: str | Path, *, max_waiting: int | None = None, **options: Any
    ) -> AsyncEngine:
        """Load a checkpoint, which takes seconds or more: not while others are served.

        Args:
          model, options: as for `LLM`.
        """
        llm = LLM(model, **options)
        return cls(llm.engine, llm.tokenizer, max_waiting=max_waiting)

    # Requests -------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        user: str | None = None,
        deadline_s: float | None = None,
        tags: Mapping[str, str] | None = None,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete a prompt: `async for output in engine.generate(...)`.

        The last output is `finished`. The request is submitted when its first output is
        asked for; cancelling, leaving the loop or closing the generator aborts it.
        (Python closes a generator that nobody holds any more; one that is held, close
        by `aclose` or `contextlib.aclosing`.) Who takes outputs more slowly than they
        come gets the latest, or with `output_kind="delta"` all that has come as one.

        Args:
          prompt: a text, a list of token ids, or a mapping as in `LLM.generate`.
          request_id: unique among the requests that have not ended; None makes one.
          arrival_time, priority, user, deadline_s, tags, cache_salt: as in
            `Engine.add_request`; times are on the engine's clock, `now`.

        Raises:
          ValueError: the request cannot be served.
          QueueFull: too many requests wait.
          EngineStopped: the engine has stopped.
        """

        def asked() -> tuple[Stream, Callable[[], None]]:
            engine = self._engine
            arrival_s = self.now() if arrival_time is None else arrival_time
            text, token_ids, salt = read("prompt", prompt, self._tokenizer)
            if salt is not None and cache_salt is not None:
                raise ValueError(
                    f"cache_salt={cache_salt!r} must not be given beside the prompt's "
                    f"own, {salt!r}; drop one"
                )
            # Checked and copied here: it takes time, and the list is the caller's.
            vocab, config, shape = engine.model.vocab_size, engine.config, engine.shape
            token_ids = validation.check_prompt(token_ids, vocab, config, shape)
            name = uuid.uuid4().hex if request_id is None else request_id
            add = functools.partial(
                engine.add_request,
                name,
                np.array(token_ids, np.int64),
                sampling_params,
                arrival_s,
                priority,
                user,
                deadline_s,
                tags,
                salt if cache_salt is None else cache_salt,
                prompt=text,
            )
            kind = getattr(sampling_params, "output_kind", None)
            return Stream(name, deltas=kind == "delta"), add

        return self._outputs(asked)

    def fork(
        self,
        request_id: str,
        new_id: str | None = None,
        sampling_params: SamplingParams | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Go on from where a request is in a second way (`Engine.fork`): the outputs of
        the fork, which lives and ends on its own. As `generate` in all else.

        Args:
          request_id: of a request that has not ended.
          new_id: the fork's; None makes one.
          sampling_params: the fork's; None takes those of the request.
        """

        def asked() -> tuple[Stream, Callable[[], None]]:
            name = uuid.uuid4().hex if new_id is None else new_id
            stream = Stream(name, deltas=False)

            def fork() -> None:
                params = self._engine.fork(request_id, name, sampling_params)
                stream.deltas = params.output_kind == "delta"

            return stream, fork

        return self._outputs(asked)

    async def _outputs(
        self, asked: Callable[[], tuple[Stream, Callable[[], None]]]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Submit a request once its first output is wanted, and yield all of them."""
        stream, add = asked()
        self._thread.submit(stream, functools.partial(self._admit, add))
        try:
            while True:
                output = await stream.next()
                yield output
                if output.finished:
                    return
        finally:
            if not stream.ended:
                self._thread.drop(stream)

    def _admit(self, add: Callable[[], None]) -> None:
        """Submit a request, or refuse it. On the engine's thread."""
        left = self._engine.get_num_unfinished_requests()
        seqs, most = self._engine.config.max_num_seqs, self._max_waiting
        if most is not None and left >= seqs + most:
            raise QueueFull(
                f"{left} requests have not ended, but max_num_seqs={seqs} can run and "
                f"max_waiting={most} may wait; try again later, or raise max_waiting"
            )
        add()

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **terms: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation, by the model's own chat template.

        Args:
          messages: `{"role": ..., "content": ...}` mappings.
          sampling_params, request_id, terms: as in `generate`.
        """
        chat = render(messages, self._tokenizer)
        return self.generate(chat, sampling_params, request_id, **terms)

    async def abort(self, request_id: str) -> bool:
        """End a request now; False if no live request has this id.

        The last output of its stream has finish_reason "abort", and holds what had come
        by then.
        """
        return await self.call(Engine.abort_request, request_id)

    # The engine -----------------------------------------------------------------------

    async def call(
        self,
        function: Callable[Concatenate[Engine, _Args], _Result],
        *args: _Args.args,
        **kwargs: _Args.kwargs,
    ) -> _Result:
        """Run `function(engine, *args, **kwargs)` on the engine's thread, between two
        steps, and return its result or raise its error.

        Every request waits for it meanwhile. It must not call `step`. Cancelling the
        call keeps it from running, if it has not begun.
        """
        work = functools.partial(function, self._engine, *args, **kwargs)
        return await asyncio.wrap_future(self._thread.call(work))

    async def stats(self) -> dict[str, int | float]:
        """The engine's counters and gauges."""
        return await self.call(Engine.stats)

    async def reset_prefix_cache(self) -> None:
        """Forget every cached block in every tier (`Engine.reset_prefix_cache`)."""
        await self.call(Engine.reset_prefix_cache)

    def now(self) -> float:
        """Seconds on the engine's clock."""
        return self._engine.now()

    def get_tokenizer(self) -> Tokenizer:
        """Of the prompts; ValueError if there is none."""
        return needed(self._tokenizer)

    async def close(self) -> None:
        """End every request, as by `abort`, and the engine (`Engine.close`)."""
        await asyncio.to_thread(self._thread.close)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
