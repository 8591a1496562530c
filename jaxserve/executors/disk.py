"""KV blocks between host memory and disk, beside the launches.

Owns the two threads that read and write files: one each, so that a load does not wait
for what is being saved. What waits for them is bounded by who asks: the scheduler keeps
no more payloads under way than its window holds. Never decides anything.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from jaxserve.executors.worker import Worker
from jaxserve.kv_tiers.block_file import Damaged
from jaxserve.kv_tiers.disk_store import DiskStore
from jaxserve.kv_tiers.host_pool import HostPool, Payload
from jaxserve.moves import Erase, Label, Load, Save, Transferred, Way

_LOOK_S = 5.0
"""How often to look for what other engines have written."""


class Disk:
    """Saves, loads and erasures of one executor.

    Args:
      store: the files. host: takes what is loaded.
      timed: takes how long transfers took.
      wake: is set when something is done.
    """

    def __init__(
        self,
        store: DiskStore,
        host: HostPool,
        timed: deque[Transferred],
        wake: threading.Event,
    ):
        self.store = store
        self._host = host
        self._timed = timed
        self._wake = wake
        self._writer = Worker("jaxserve-disk-writer")
        self._reader = Worker("jaxserve-disk-reader")
        # Whether each payload under way has made it.
        self._jobs: dict[int, Future[bool]] = {}
        self._done: deque[int] = deque()
        self._looked_s = time.monotonic()
        self._looking: tuple[DiskStore, Future] | None = None

    def expect(self, name: int) -> None:
        """A payload will be saved once it is on the host; see `save`."""
        self._jobs[name] = Future()

    def renew(self, fingerprint: bytes) -> tuple[DiskStore, DiskStore]:
        """Another store for all that is asked from now on; the old one and it."""
        old, self.store = self.store, self.store.of(fingerprint)
        return old, self.store

    def forget(self, store: DiskStore) -> None:
        """Erase a store that nothing more is asked of."""
        self._writer.submit(store.clear)

    def save(
        self,
        orders: Sequence[Save | Erase],
        payloads: Mapping[int, Payload],
        store: DiskStore,
    ) -> None:
        """Write payloads that were expected, and remove files."""
        asked_s = time.perf_counter()
        self._writer.submit(self._save, orders, payloads, store, asked_s)

    def _save(
        self,
        orders: Sequence[Save | Erase],
        payloads: Mapping[int, Payload],
        store: DiskStore,
        asked_s: float,
    ) -> None:
        start_s = time.perf_counter()
        for order in orders:
            if isinstance(order, Save):
                payload = payloads[order.name]
                self._finish(order.name, store.save, order.label, payload)
            else:
                store.erase(order.label)
        if payloads:
            self._clock("save", list(payloads), asked_s, start_s)

    def load(self, orders: Sequence[Load]) -> None:
        """Read payloads into host memory."""
        asked_s = time.perf_counter()
        for order in orders:
            self._jobs[order.name] = Future()
        self._reader.submit(self._load, orders, self.store, asked_s)

    def _load(self, orders: Sequence[Load], store: DiskStore, asked_s: float) -> None:
        start_s = time.perf_counter()
        for name, label in orders:
            self._finish(name, self._read, name, label, store)
        self._clock("load", [order.name for order in orders], asked_s, start_s)

    def _read(self, name: int, label: Label, store: DiskStore) -> None:
        self._host.add(name, store.load(label))

    def _finish(self, name: int, work: Callable[..., None], *args: Any) -> None:
        job, error = self._jobs[name], None
        try:
            work(*args)
        except Exception as raised:
            error = raised
        # Told just before the result is there: who has that may take it off again.
        self._done.append(name)
        if error is None or isinstance(error, OSError | Damaged):
            job.set_result(error is None)
        else:  # a fault of ours: whoever asks shall hear of it
            job.set_exception(error)
        self._wake.set()

    def _clock(
        self, way: Way, names: Sequence[int], asked_s: float, start_s: float
    ) -> None:
        seconds = time.perf_counter() - start_s
        waited_s = start_s - asked_s
        self._timed.append(Transferred(way, tuple(names), seconds, waited_s))

    def done(self) -> list[tuple[int, bool]]:
        """Payloads saved and loaded since the last call, and whether they made it."""
        names = [self._done.popleft() for _ in range(len(self._done))]
        return [(name, self._jobs.pop(name).result()) for name in names]

    def wait(self, name: int) -> bool:
        """Whether a payload has made it, once that is known."""
        made_it = self._jobs[name].result()
        del self._jobs[name]
        self._done.remove(name)
        return made_it

    def outcomes(self) -> list[tuple[int, bool]]:
        """What `done` has to tell, once nothing is under way."""
        for thread in (self._writer, self._reader):
            thread.submit(lambda: None).result()
        return [(name, self._jobs[name].result()) for name in self._done]

    def tell(self, outcomes: Sequence[tuple[int, bool]]) -> None:
        """Have `done` tell this, and nothing else."""
        self._done.clear()
        self._jobs.clear()
        for name, made_it in outcomes:
            self._jobs[name] = Future()
            self._jobs[name].set_result(made_it)
            self._done.append(name)
        self._wake.set()

    def changes(self) -> tuple[Sequence[Label], Sequence[bytes]]:
        """What other engines have written and removed, as far as it was looked at."""
        if self._looking is not None and self._looking[1].done():
            (store, looking), self._looking = self._looking, None
            return looking.result() if store is self.store else ((), ())
        now_s = time.monotonic()
        if self._looking is None and now_s - self._looked_s > _LOOK_S:
            self._looked_s = now_s
            self._looking = self.store, self._reader.submit(self.store.changes)
        return (), ()

    def close(self, timeout_s: float) -> bool:
        """Finish what was asked for, and stop; False if that takes longer."""
        self._writer.submit(self.store.close)
        read, written = self._reader.close(timeout_s), self._writer.close(timeout_s)
        return read and written
