"""Outputs on their way from the engine's thread to the event loops that wait for them.

Owns what has come and was not taken yet. Never sees the engine.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable

from jaxserve.outputs import RequestOutput, joined


class Stream:
    """Outputs of one request on their way to who waits for them: never more than one,
    however slowly they are taken. Made in the event loop of who waits.

    Args:
      request_id: whose.
      deltas: the one is all that has come, joined; else the latest. May be set until
        the first one comes.
    """

    def __init__(self, request_id: str, *, deltas: bool):
        self.request_id = request_id
        self.loop = asyncio.get_running_loop()
        self.ended = False  # the last output, or the error, was taken
        self.deltas = deltas
        self._lock = threading.Lock()
        self._output: RequestOutput | None = None
        self._error: BaseException | None = None
        self._ready = asyncio.Event()

    def put(self, output: RequestOutput) -> bool:
        """Add an output; whether who waits must be woken. On the engine's thread."""
        with self._lock:
            before = self._output
            if before is not None and self.deltas:
                output = joined(before, output)
            self._output = output
        return before is None

    def fail(self, error: BaseException) -> bool:
        """End with an error, behind what has come; the same result as of `put`."""
        with self._lock:
            self._error = error
            return self._output is None

    def wake(self) -> None:
        """There is something to take. In the loop's thread."""
        self._ready.set()

    async def next(self) -> RequestOutput:
        """Take the output, once there is one, or raise the error."""
        while True:
            with self._lock:
                output, self._output = self._output, None
                error = self._error
            if output is not None:
                self.ended = output.finished
                return output
            if error is not None:
                self.ended = True
                raise error
            # Only this loop's thread sets it, and not before we wait.
            self._ready.clear()
            await self._ready.wait()


def wake(streams: Iterable[Stream]) -> list[Stream]:
    """Wake those who wait for the streams, each loop once; from any thread.

    Returns the streams whose loop was closed: nobody will ever take from them.
    """
    loops: dict[asyncio.AbstractEventLoop, list[Stream]] = {}
    for stream in streams:
        loops.setdefault(stream.loop, []).append(stream)
    lost: list[Stream] = []
    for loop, ready in loops.items():
        try:
            loop.call_soon_threadsafe(_wake_all, ready)
        except RuntimeError:
            lost += ready
    return lost


def _wake_all(streams: Iterable[Stream]) -> None:
    for stream in streams:
        stream.wake()
