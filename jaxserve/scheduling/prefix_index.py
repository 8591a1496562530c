"""Which cached block holds which tokens: content hashes, handles, pins and LRU order.

Owns names. A key is the hash of a whole prefix, chained block by block, so that equal
keys mean equal tokens, salt and weights. Never sees a physical block, a slot or a count
of free blocks. (Chained block hashes: vLLM's automatic prefix caching, Kwon et al.
2023.)
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from jaxserve.moves import Label

DIGEST_BYTES = 16


def root_key(
    cache_salt: str | None, weight_version: int, family: int | None = None
) -> bytes:
    """The parent of a first block: everything but tokens that a block depends on.

    Each extra is tagged and length-framed, so that no two lists of extras run together.

    Args:
      family: only requests of it find the block; None = everybody.
    """
    digest = hashlib.blake2b(b"jaxserve prefix 1", digest_size=DIGEST_BYTES)
    extras = [(b"weights", str(weight_version).encode())]
    if cache_salt is not None:
        extras.append((b"salt", cache_salt.encode()))
    if family is not None:
        extras.append((b"family", str(family).encode()))
    for tag, value in extras:
        for part in (tag, value):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def salt_tag(cache_salt: str | None) -> bytes:
    """A digest of a salt, which a file may bear; empty without one."""
    if cache_salt is None:
        return b""
    text = b"jaxserve salt 1" + cache_salt.encode()
    return hashlib.blake2b(text, digest_size=DIGEST_BYTES).digest()


def extend_keys(
    keys: list[bytes], root: bytes, tokens: Sequence[int], block_size: int
) -> None:
    """Append to `keys` the chained key of each full block of `tokens` that lacks one.

    Args:
      keys: of the leading blocks of the same tokens; extended in place.
    """
    for start in range(
        len(keys) * block_size, len(tokens) - block_size + 1, block_size
    ):
        block = np.asarray(tokens[start : start + block_size], np.int64).tobytes()
        parent = keys[-1] if keys else root
        keys.append(hashlib.blake2b(parent + block, digest_size=DIGEST_BYTES).digest())


class PrefixIndex:
    """Handles of cached blocks by key, with pins and an eviction order.

    Whoever pins a block pins its whole chain, and a chain is unpinned deepest block
    first. So the least recently unpinned handle never has a live child: evicting in
    that order removes leaves before parents with no tree to keep.
    """

    def __init__(self, num_handles: int):
        self._free = list(range(num_handles - 1, -1, -1))
        self._retired: list[int] = []  # usable again from the next plan on
        self._handle: dict[bytes, int] = {}
        self._label: dict[int, Label | None] = {}  # live handles; None = forgotten
        self._pins: dict[int, int] = {}
        self._fresh: set[int] = set()  # published by this plan; found from the next on
        self._idle: OrderedDict[int, None] = OrderedDict()  # unpinned, oldest first

    @property
    def live(self) -> int:
        """Handles that hold a block."""
        return len(self._label)

    @property
    def evictable(self) -> int:
        """Handles that nobody pins."""
        return len(self._idle)

    def begin_plan(self) -> None:
        """What the last plan published can be found, what it retired can be reused."""
        self._fresh.clear()
        self._free += self._retired
        self._retired.clear()

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Handles of the longest cached prefix of `keys` that can be adopted now."""
        found = []
        for key in keys:
            handle = self._handle.get(key)
            if handle is None or handle in self._fresh:
                break
            found.append(handle)
        return found

    def find(self, key: bytes) -> int | None:
        """The live handle of a key, fresh or not."""
        return self._handle.get(key)

    def holds(self, key: bytes) -> bool:
        """Whether a key has a live handle."""
        return key in self._handle

    def pin(self, handles: Sequence[int]) -> None:
        """Keep the handles of a chain, first block first."""
        for handle in handles:
            self._pins[handle] += 1
            self._idle.pop(handle, None)

    def unpin(self, handles: Sequence[int]) -> None:
        """Let go of a chain, given first block first; the deepest is evicted first."""
        for handle in reversed(handles):
            self._pins[handle] -= 1
            if self._pins[handle] == 0:
                self._idle[handle] = None
                if self._label[handle] is None:  # forgotten: to be the next to go
                    self._idle.move_to_end(handle, last=False)

    def pins(self, handle: int) -> int:
        """How many chains hold the handle."""
        return self._pins[handle]

    def publish(self, label: Label, *, fresh: bool) -> int | None:
        """A new handle for a key, pinned once; None if every handle is in use.

        Args:
          fresh: the block is written by this very plan, so it is found from the next
            on.
        """
        if not self._free:
            return None
        handle = self._free.pop()
        self._handle[label.key] = handle
        self._label[handle] = label
        self._pins[handle] = 1
        if fresh:
            self._fresh.add(handle)
        return handle

    @property
    def oldest(self) -> int:
        """The unpinned handle that was let go of first; there must be one."""
        return next(iter(self._idle))

    def label(self, handle: int) -> Label | None:
        """What a live handle names; None if `reset` forgot it."""
        return self._label[handle]

    def labels(self) -> list[tuple[int, Label]]:
        """Every live handle that can be found, and what it names: the longest unused
        first, those in use last."""
        named = [(h, label) for h, label in self._label.items() if label is not None]
        used = [item for item in named if item[0] not in self._idle]
        used.sort(key=lambda item: -item[1].column)
        idle = [(handle, self._label[handle]) for handle in self._idle]
        return [(h, label) for h, label in idle if label is not None] + used

    def evict(self, handle: int) -> None:
        """Forget an unpinned handle, which the caller retires in this plan."""
        del self._idle[handle]
        label = self._label.pop(handle)
        if label is not None:
            del self._handle[label.key]
        del self._pins[handle]
        self._retired.append(handle)

    @property
    def has_forgotten(self) -> bool:
        """Whether the oldest handle is one that `reset` left keyless."""
        return bool(self._idle) and self._label[self.oldest] is None

    def forget(self, keys: Iterable[bytes]) -> None:
        """Forget some keys, as `reset` does all."""
        for key in keys:
            handle = self._handle.pop(key, None)
            if handle is not None:
                self._label[handle] = None
                if handle in self._idle:
                    self._idle.move_to_end(handle, last=False)

    def reset(self) -> None:
        """Forget every key. Pinned blocks stay with their owners, and are never found.

        Handles without a key come first in the eviction order.
        """
        self._handle.clear()
        for handle in self._label:
            self._label[handle] = None
