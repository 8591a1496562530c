"""Which blocks a tier below the device keeps, and which leaves it next.

Owns the keys of one tier and their order of eviction. Counts and names only: it never
sees a payload, a file or another tier.

Children leave before parents, for a block is found only behind its parent. Among the
blocks without children:
* "lru" takes the least recently used,
* "lfu" the least often used,
* "cost" the one that is cheapest to compute again, as GreedyDual-Size does (Cao and
  Irani, 1997): a block's worth is its seconds a byte, on top of the worth of the last
  one evicted, so that what is not used grows old.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from jaxserve.moves import Label

Eviction = Literal["lru", "lfu", "cost"]


@dataclasses.dataclass(slots=True)
class _Entry:
    label: Label
    payload: int | None
    uses: int = 0
    worth: float = 0.0
    stamp: int = 0  # of the last use


class TierIndex:
    """Blocks by key; all have the same size.

    Args:
      eviction: the policy.
      compute_s: seconds to compute the block of a column, its prefix being there.
    """

    def __init__(self, eviction: Eviction, compute_s: Callable[[int], float]):
        self._eviction = eviction
        self._compute_s = compute_s
        self._entries: dict[bytes, _Entry] = {}
        self._children: dict[bytes, set[bytes]] = {}  # here, of any parent
        self._pins: Counter[bytes] = Counter()
        self._pinned = 0  # entries with pins
        self._stamp = 0
        self._inflation = 0.0
        self._heap: list[tuple[float, int, bytes]] = []  # perhaps out of date

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    @property
    def evictable(self) -> int:
        """Blocks that could leave, one after another.

        Who pins a block pins all before it, so what is not pinned has no child that is.
        """
        return len(self._entries) - self._pinned

    def label(self, key: bytes) -> Label:
        """Of a block that is here."""
        return self._entries[key].label

    def labels(self) -> list[Label]:
        """Of all blocks, the least recently used first."""
        entries = sorted(self._entries.values(), key=lambda entry: entry.stamp)
        return [entry.label for entry in entries]

    def payload(self, key: bytes) -> int | None:
        """The payload of a block, if it has one here."""
        entry = self._entries.get(key)
        return entry.payload if entry else None

    def children(self, key: bytes) -> list[bytes]:
        """Keys of the blocks here that follow this one, be it here or not."""
        return sorted(self._children.get(key, ()))

    def add(self, label: Label, payload: int | None = None) -> None:
        """Keep another block; it counts as used once."""
        self._entries[label.key] = _Entry(label, payload)
        self._pinned += self._pins[label.key] > 0
        self._children.setdefault(label.parent, set()).add(label.key)
        self.use([label.key])

    def remove(self, key: bytes) -> int | None:
        """Forget a block; returns its payload."""
        entry = self._entries.pop(key)
        self._pinned -= self._pins[key] > 0
        siblings = self._children[entry.label.parent]
        siblings.remove(key)
        if not siblings:
            del self._children[entry.label.parent]
            self._offer(entry.label.parent)  # it has no children now
        return entry.payload

    def use(self, keys: Sequence[bytes]) -> None:
        """Blocks of a chain were used, first block first."""
        for key in reversed(keys):  # so that a parent outlives its children
            entry = self._entries.get(key)
            if entry is None:
                continue
            self._stamp += 1
            entry.stamp = self._stamp
            entry.uses += 1
            if self._eviction == "lfu":
                entry.worth = entry.uses
            elif self._eviction == "cost":
                entry.worth = self._inflation + self._compute_s(entry.label.column)
            self._offer(key)

    def pin(self, keys: Iterable[bytes]) -> None:
        """Keep the blocks of a whole chain, those that come later included."""
        for key in keys:
            self._pins[key] += 1
            self._pinned += self._pins[key] == 1 and key in self._entries

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Let go of a chain that was pinned."""
        for key in keys:
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]
                self._pinned -= key in self._entries
                self._offer(key)

    def _offer(self, key: bytes) -> None:
        """It may be the next one to leave, as far as its own state is concerned."""
        entry = self._entries.get(key)
        if entry is not None and key not in self._children and not self._pins[key]:
            heapq.heappush(self._heap, (entry.worth, entry.stamp, key))
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = [item for item in set(self._heap) if self._is_current(*item)]
            heapq.heapify(self._heap)

    def _is_current(self, worth: float, stamp: int, key: bytes) -> bool:
        entry = self._entries.get(key)
        if entry is None or entry.stamp != stamp or entry.worth != worth:
            return False
        return key not in self._children and not self._pins[key]

    def victim(self) -> bytes | None:
        """The block that should leave next; None if all are pinned."""
        while self._heap and not self._is_current(*self._heap[0]):
            heapq.heappop(self._heap)
        if not self._heap:
            return None
        self._inflation = max(self._inflation, self._heap[0][0])
        return self._heap[0][2]

    def holds_no_pins(self) -> bool:
        """Whether nobody pins anything."""
        return not self._pins
