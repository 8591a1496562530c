"""Keeps requests in a policy's order, recomputing only the keys that may have changed.

Owns the policy's state and the cached keys. Never sees a block, a slot or a token id.
"""

from __future__ import annotations

import bisect
import heapq
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxserve.core import Event, Request
from jaxserve.scheduling.policies.base import Policy, View, unlimited, unmoved
from jaxserve.scheduling.retelling import retold
from jaxserve.scheduling.running import Running, progressed

RUNNING, PREEMPTED, NEW = range(3)


class Key(NamedTuple):
    """Where a request stands; compared field by field, never equal for two requests."""

    klass: float
    order: tuple
    tie: int  # RUNNING, PREEMPTED or NEW
    index: int


class _Entry(NamedTuple):
    key: Key
    request: Request


_key = operator.attrgetter("key")


class Ranking:
    """All live requests, those that run and those that wait sorted.

    Args:
      policy: orders them. view: what the policy may see of a request.
    """

    def __init__(self, policy: Policy, view: Callable[[Request], View]):
        self._policy = policy
        self._view = view
        self._state = policy.init()
        self._entries: dict[int, _Entry] = {}  # by submission index
        self._waiting: list[_Entry] = []  # sorted by key
        self._running: list[_Entry] = []  # likewise
        self._stale: set[int] = set()
        self._left: set[int] = set()  # without a slot, about to end
        self._restless: set[int] = set()  # those ranked anew at every refresh
        self._expiry: list[tuple[float, int]] = []  # heap of (time, submission index)
        self._due: dict[int, float] = {}  # the one entry of the heap that counts
        self._events: list[Event] = []
        self._ended: dict[int, Request] = {}  # since the policy's last update

    @property
    def policy(self) -> Policy:
        """The policy, whose state this keeps."""
        return self._policy

    def take_over(self, policy: Policy, running: Mapping[int, Running]) -> None:
        """Another policy orders the requests from now on.

        It hears of each that has arrived, and how far it has got, as if all of that had
        just happened.

        Args:
          running: those that have a slot, by submission index.
        """
        self._policy, self._state = policy, policy.init()
        self._events.clear()
        self._ended.clear()
        self._stale.update(self._entries)
        self._restless.clear()
        self._expiry.clear()
        self._due.clear()
        for index in sorted(self._entries):
            request, stay = self._entries[index].request, running.get(index)
            prompt, slot = len(request.prompt), stay.slot if stay else None
            computed = min(stay.rows, prompt) if stay else prompt
            for event in retold(request, slot, computed):
                self.note(event)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: Request) -> None:
        """A new request; it is ranked at the next `refresh`."""
        self._entries[request.index] = _Entry(Key(0, (), NEW, request.index), request)
        self._stale.add(request.index)

    def is_new(self, index: int) -> bool:
        """Whether a request waits that has never had a slot."""
        entry = self._entries.get(index)
        return entry is not None and entry.request.num_cached_tokens is None

    def remove(self, request: Request) -> None:
        """The request ended."""
        self._unlist(self._entries.pop(request.index).key)
        if self.listens:
            self._ended[request.index] = request
        self._left.discard(request.index)
        self._stale.discard(request.index)
        self._forget_time(request.index)

    def leave(self, request: Request) -> None:
        """The request gave its slot back and will end: it is nobody's rival now."""
        self._unlist(self._entries[request.index].key)
        self._left.add(request.index)

    def touch(self, request: Request) -> None:
        """The request took or lost a slot: rank it again at the next `refresh`."""
        self._stale.add(request.index)

    def note(self, event: Event) -> None:
        """Queue an event for the policy's next update."""
        if self.listens:
            self._events.append(event)

    @property
    def listens(self) -> bool:
        """Whether the policy takes in events."""
        return self._policy.update is not unmoved

    def refresh(self, now_s: float) -> None:
        """Feed the events noted, then recompute the keys that may differ at now_s."""
        if self._events:
            update = self._policy.update
            self._state, stale = update(self._state, self._events, self._view_of)
            self._events = []
            self._ended.clear()
            self._stale.update(self._entries if stale is None else stale)
        while self._expiry and self._expiry[0][0] <= now_s:
            until_s, index = heapq.heappop(self._expiry)
            if self._due.get(index) == until_s:
                del self._due[index]
                self._stale.add(index)
        asked = self._stale | self._restless
        stale = [i for i in asked if i in self._entries and i not in self._left]
        self._stale.clear()
        if len(stale) * 8 > len(self._entries):
            self._rank_most(stale, now_s)
        else:
            for index in sorted(stale):
                self._unlist(self._entries[index].key)
                entry = self._rank(index, now_s)
                bisect.insort(self._list_of(entry), entry, key=_key)
        if len(self._expiry) > 2 * len(self._due):  # mostly entries put off since
            self._expiry = [(at, index) for index, at in self._due.items()]
            heapq.heapify(self._expiry)

    def _view_of(self, index: int) -> View:
        entry = self._entries.get(index)
        return self._view(entry.request if entry else self._ended[index])

    def _list_of(self, entry: _Entry) -> list[_Entry]:
        return self._running if entry.key.tie == RUNNING else self._waiting

    def _rank(self, index: int, now_s: float) -> _Entry:
        request = self._entries[index].request
        view = self._view(request)
        klass, order = self._policy.rank(self._state, view, now_s)
        tie = RUNNING if view.running else PREEMPTED if request.preemptions else NEW
        entry = _Entry(Key(klass, order, tie, index), request)
        self._entries[index] = entry
        until_s = self._policy.until(self._state, view, now_s)
        if until_s is None or until_s <= now_s or self._due.get(index) != until_s:
            self._expire(index, until_s, now_s)
        return entry

    def _rank_most(self, stale: Collection[int], now_s: float) -> None:
        """Rank many at once: sorting is cheaper than finding each its place."""
        for index in sorted(stale):
            self._rank(index, now_s)
        for entries in (self._running, self._waiting):
            entries.clear()
        for index, entry in self._entries.items():
            if index not in self._left:
                self._list_of(entry).append(entry)
        for entries in (self._running, self._waiting):
            entries.sort(key=_key)

    def _forget_time(self, index: int) -> None:
        self._due.pop(index, None)
        self._restless.discard(index)

    def _expire(self, index: int, until_s: float | None, now_s: float) -> None:
        self._forget_time(index)
        if until_s is not None and until_s <= now_s:
            self._restless.add(index)
        elif until_s is not None:
            self._due[index] = until_s
            heapq.heappush(self._expiry, (until_s, index))

    def _unlist(self, key: Key) -> None:
        for entries in (self._running, self._waiting):
            i = bisect.bisect_left(entries, key, key=_key)
            if i < len(entries) and entries[i].key == key:
                del entries[i]

    def key(self, request: Request) -> Key:
        """Where the request stood at the last `refresh`."""
        return self._entries[request.index].key

    @property
    def num_waiting(self) -> int:
        """Requests without a slot, as of the last `refresh`."""
        return len(self._waiting)

    @property
    def next_due_s(self) -> float:
        """When some key may differ with nothing marking it stale."""
        if self._restless:
            return -math.inf
        return min(self._due.values(), default=math.inf)

    def reacts_to_progress(self, running: Sequence[Running], tokens: int) -> bool:
        """Whether any key may differ once each has sampled so many tokens more."""
        if not self.listens:
            return False
        events = [progressed(r, 0.0, 0, tokens) for r in running]
        stale = self._policy.update(self._state, events, self._view_of)[1]
        return stale is None or len(stale) > 0

    def allow(self, request: Request) -> int | None:
        """Tokens that the policy lets the request sample before it ranks it again."""
        if self._policy.allow is unlimited:
            return None
        return self._policy.allow(self._state, self._view(request))

    @property
    def first_waiting_class(self) -> float:
        """The smallest class among those that wait, as of the last `refresh`."""
        return self._waiting[0].key.klass if self._waiting else math.inf

    @property
    def last_class(self) -> float:
        """The largest class among those that run, as of the last `refresh`."""
        return self._running[-1].key.klass if self._running else -math.inf

    def running(self) -> list[Request]:
        """Those that run, first to last, as of the last `refresh`."""
        return [entry.request for entry in self._running]

    def waiting(self) -> list[Request]:
        """Those that wait, first to last, as of the last `refresh`."""
        return [entry.request for entry in self._waiting]

    def in_order(self) -> Iterator[Request]:
        """All of them, first to last, as of the last `refresh`."""
        merged = heapq.merge(list(self._running), list(self._waiting), key=_key)
        return (entry.request for entry in merged)
