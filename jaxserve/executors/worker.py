"""A thread that works off what it is given, in order.

Owns the thread, which cannot keep the process from ending: a disk that hangs would, in
a pool whose threads are joined at exit. Never sees what the work is.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

_Job = tuple[Future, Callable[..., Any], tuple]


class Worker:
    """One daemon thread, which ends with this object.

    Args:
      name: of the thread.
    """

    def __init__(self, name: str):
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        # The thread must not keep this alive.
        self._thread = threading.Thread(
            target=_work, args=(self._jobs,), name=name, daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, work: Callable[..., Any], *args: Any) -> Future:
        """Do something after all that was given before."""
        job: Future = Future()
        self._jobs.put((job, work, args))
        return job

    def close(self, timeout_s: float) -> bool:
        """Do what was given, and stop; False if that takes longer."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    while (item := jobs.get()) is not None:
        job, work, args = item
        try:
            job.set_result(work(*args))
        except BaseException as error:
            job.set_exception(error)
        del item, job, work, args  # what they hold may be large
