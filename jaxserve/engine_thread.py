"""The thread that an engine runs on, and what other threads ask of it.

Owns the loop of steps, orders between them, and the streams of requests that have not
ended. The engine knows nothing of threads. Never sees a plan or a prompt's text.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from typing import NamedTuple, TypeVar

from jaxserve.engine import Engine
from jaxserve.outputs import RequestOutput
from jaxserve.streams import Stream, wake

_ORDERS_A_STEP = 128
"""So that a burst of submissions does not hold up those who run."""

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class EngineStopped(RuntimeError):
    """The engine was closed, has stopped by an error, or went back to a snapshot, as
    the message says."""


class _Order(NamedTuple):
    """What the thread is asked for."""

    run: Callable[[], None]
    refuse: Callable[[BaseException], None]  # instead, where the engine stops before


class EngineThread:
    """Steps an engine while it has work, sleeps while it has none, and does what it is
    asked for in order. Its public methods may be called from any thread.

    Args:
      engine: to be used by nobody else from now on.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._asked = threading.Condition()
        self._orders: deque[_Order] = deque()
        self._stopped: str | None = None  # why nothing may be asked any more
        self._cause: BaseException | None = None
        self._saves = True  # what is cached, when it closes
        # The thread alone sees these.
        self._streams: dict[str, Stream] = {}  # by id, of requests that have not ended
        self._closing = False
        self._thread = threading.Thread(
            target=self._run, name="jaxserve-engine", daemon=True
        )
        self._thread.start()
        # JAX does not survive a thread that goes on while the interpreter goes down.
        atexit.register(self._leave)

    def submit(self, stream: Stream, add: Callable[[], None]) -> None:
        """Have `add` submit a request, whose outputs then go to the stream, as does an
        error of `add`.

        Raises:
          EngineStopped: as do all of these but `drop` and `close`.
        """
        self._ask(
            functools.partial(self._submit, stream, add),
            lambda error: self._wake([stream] if stream.fail(error) else []),
        )

    def drop(self, stream: Stream) -> None:
        """Nobody takes from the stream any more: abort its request, if it lives."""
        with contextlib.suppress(EngineStopped):
            self._ask(functools.partial(self._drop, stream), lambda error: None)

    def call(self, work: Callable[[], _Result]) -> Future[_Result]:
        """Have something done between two steps; its result or error."""
        future: Future[_Result] = Future()
        self._ask(
            functools.partial(self._call, future, work),
            functools.partial(_fail, future),
        )
        return future

    def close(self) -> None:
        """End every request and the engine, and return when the thread has ended."""
        with contextlib.suppress(EngineStopped):
            self._ask(self._close, lambda error: None)
        self._thread.join()

    def _leave(self) -> None:
        """The interpreter ends: so must the thread. Nothing is saved any more."""
        self._saves = False
        with contextlib.suppress(EngineStopped):
            self._ask(self._close, lambda error: None)
        self._thread.join(timeout=30.0)

    def _ask(
        self, run: Callable[[], None], refuse: Callable[[BaseException], None]
    ) -> None:
        with self._asked:
            if self._stopped is not None:
                raise self._error()
            self._orders.append(_Order(run, refuse))
            self._asked.notify()
        self._engine.executor.interrupt()

    def _error(self) -> EngineStopped:
        error = EngineStopped(self._stopped)
        error.__cause__ = self._cause
        return error

    # On the thread --------------------------------------------------------------------

    def _run(self) -> None:
        engine = self._engine
        try:
            while not self._closing:
                for _ in range(self._wait()):
                    # It stays in the queue, to be refused if it ends the engine.
                    self._orders[0].run()
                    self._orders.popleft()
                # With its KV memory released it serves nobody; requests wait.
                done = engine.take_outputs() if engine.released else engine.step()
                self._route(done)
            self._stop("the engine was closed")
            for name in list(self._streams):
                engine.abort_request(name)
            self._route(engine.take_outputs())
            if self._saves:
                engine.close()
            else:
                engine.executor.close()
        except BaseException as error:
            _log.error("the engine has stopped", exc_info=error)
            self._stop(engine.broken or f"the engine has stopped: {error!r}", error)
            engine.executor.close()
        finally:
            atexit.unregister(self._leave)

    def _wait(self) -> int:
        """Sleep until there is something to do; how many orders to take."""
        with self._asked:
            while not (self._orders or self._has_work()):
                self._asked.wait()
            return min(len(self._orders), _ORDERS_A_STEP)

    def _has_work(self) -> bool:
        return self._engine.has_unfinished_requests() and not self._engine.released

    def _stop(self, why: str, cause: BaseException | None = None) -> None:
        """Refuse what was and will be asked; after an error end the streams by it."""
        with self._asked:
            if self._stopped is None:
                self._stopped, self._cause = why, cause
            orders = list(self._orders)
            self._orders.clear()
        for order in orders:
            order.refuse(self._error())
        if cause is not None:
            self._end_streams(self._error)

    def _end_streams(self, error: Callable[[], EngineStopped]) -> None:
        streams, self._streams = self._streams, {}
        self._wake([s for s in streams.values() if s.fail(error())])

    def _close(self) -> None:
        self._closing = True

    def _submit(self, stream: Stream, add: Callable[[], None]) -> None:
        try:
            add()
        except BaseException as error:  # of the caller's own objects, whatever it is
            self._wake([stream] if stream.fail(error) else [])
        else:
            self._streams[stream.request_id] = stream
        # A fork reads the launches in flight: who ended in them is told at once, for
        # the next order may use the id again.
        self._route(self._engine.take_outputs())

    def _drop(self, stream: Stream) -> None:
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]
            self._engine.abort_request(stream.request_id)
            # At once: the id may be used again by the next order.
            self._route(self._engine.take_outputs())

    def _call(self, future: Future[_Result], work: Callable[[], _Result]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        before = self._engine.times_restored
        try:
            tell = functools.partial(future.set_result, work())
        except BaseException as error:
            tell = functools.partial(_fail, future, error)
        if self._engine.times_restored != before:
            why = "the engine went back to a snapshot, and this request is lost"
            self._end_streams(lambda: EngineStopped(why))
        self._route(self._engine.take_outputs())
        tell()

    def _route(self, outputs: Iterable[RequestOutput]) -> None:
        """Hand outputs to their streams."""
        awake = []
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue  # nobody waits for it
            if output.finished:
                del self._streams[output.request_id]
            if stream.put(output):
                awake.append(stream)
        self._wake(awake)

    def _wake(self, streams: Iterable[Stream]) -> None:
        for stream in wake(streams):
            self._drop(stream)


def _fail(future: Future, error: BaseException) -> None:
    """Hand an error to who waits for a call, if anybody still does."""
    if isinstance(error, StopIteration):  # asyncio would drop it, and the caller hang
        cause, error = error, RuntimeError("the function raised StopIteration")
        error.__cause__ = cause
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)
