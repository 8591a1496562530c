"""Keeps requests in a policy's order, recomputing only the keys that may have changed.

Owns the policy's state and the cached keys. Never sees a block, a slot or a token id.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from jaxserve.core import Event, Request
from jaxserve.scheduling.policies import Policy, View


class Key(NamedTuple):
    """Where a request stands; compared field by field, never equal for two requests."""

    klass: int
    order: tuple
    tie: int  # 0 running, 1 preempted, 2 never ran
    index: int


class _Entry(NamedTuple):
    key: Key
    request: Request


class Ranking:
    """All live requests, waiting ones sorted.

    Args:
      policy: orders them. view: what the policy may see of a request.
    """

    def __init__(self, policy: Policy, view: Callable[[Request], View]):
        self._policy = policy
        self._view = view
        self._state = policy.init()
        self._entries: dict[int, _Entry] = {}  # by submission index
        self._waiting: list[_Entry] = []  # sorted by key
        self._stale: set[int] = set()
        self._expiry: list[tuple[float, int]] = []  # heap of (time, submission index)
        self._due: dict[int, float] = {}  # the one entry of the heap that counts
        self._events: list[Event] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: Request) -> None:
        """A new request; it is ranked at the next `refresh`."""
        self._entries[request.index] = _Entry(Key(0, (), 2, request.index), request)
        self._stale.add(request.index)

    def remove(self, request: Request) -> None:
        """The request ended."""
        self._unlist(self._entries.pop(request.index))
        self._stale.discard(request.index)
        self._due.pop(request.index, None)

    def touch(self, request: Request) -> None:
        """The request took or lost a slot: rank it again at the next `refresh`."""
        self._stale.add(request.index)

    def note(self, event: Event) -> None:
        """Queue an event for the policy's next update."""
        self._events.append(event)

    def refresh(self, now_s: float) -> None:
        """Feed the events noted, then recompute the keys that may differ at now_s."""
        if self._events:
            self._state, stale = self._policy.update(self._state, self._events)
            self._events = []
            self._stale.update(self._entries if stale is None else stale)
        while self._expiry and self._expiry[0][0] <= now_s:
            until_s, index = heapq.heappop(self._expiry)
            if self._due.get(index) == until_s:
                del self._due[index]
                self._stale.add(index)
        for index in sorted(self._stale & self._entries.keys()):
            self._rank(self._entries[index], now_s)
        self._stale.clear()
        if len(self._expiry) > 2 * len(self._due):  # mostly entries put off since
            self._expiry = [(at, index) for index, at in self._due.items()]
            heapq.heapify(self._expiry)

    def _rank(self, entry: _Entry, now_s: float) -> None:
        self._unlist(entry)
        request = entry.request
        view = self._view(request)
        klass, order = self._policy.rank(self._state, view, now_s)
        tie = 0 if view.running else 1 if request.preemptions else 2
        entry = _Entry(Key(klass, order, tie, request.index), request)
        self._entries[request.index] = entry
        if not view.running:
            bisect.insort(self._waiting, entry, key=lambda e: e.key)
        self._expire(request.index, self._policy.until(self._state, view, now_s))

    def _expire(self, index: int, until_s: float | None) -> None:
        if until_s is None:
            self._due.pop(index, None)
        elif self._due.get(index) != until_s:
            self._due[index] = until_s
            heapq.heappush(self._expiry, (until_s, index))

    def _unlist(self, entry: _Entry) -> None:
        i = bisect.bisect_left(self._waiting, entry.key, key=lambda e: e.key)
        if i < len(self._waiting) and self._waiting[i].request is entry.request:
            del self._waiting[i]

    def key(self, request: Request) -> Key:
        """Where the request stood at the last `refresh`."""
        return self._entries[request.index].key

    def allow(self, request: Request) -> int | None:
        """Tokens that the policy lets the request sample before it ranks it again."""
        return self._policy.allow(self._state, self._view(request))

    def in_order(self, running: Sequence[Request]) -> Iterator[Request]:
        """Running and waiting requests, first to last, as they stand now."""
        entries = sorted((self._entries[r.index] for r in running), key=lambda e: e.key)
        merged = heapq.merge(entries, list(self._waiting), key=lambda e: e.key)
        return (entry.request for entry in merged)
