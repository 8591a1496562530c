"""Names and counts of the blocks in host memory.

Owns which payloads are there and for what. Counts and names only: it never sees a
payload's contents, a request or a plan's arrays.

Host memory has two parts. The *pool* keeps swapped requests and cached blocks. The
*window* is what payloads pass through on their way to disk and back: a fixed number of
blocks beside the pool, so that a slow disk fills the window and then is not asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from jaxserve.scheduling.plan_builder import PlanBuilder

Part = Literal["pool", "window"]


class Payloads:
    """Host memory for `pool` blocks, and for `window` more beside a disk."""

    def __init__(self, pool: int, window: int = 0):
        self._size: dict[Part, int] = {"pool": pool, "window": window}
        self._held: dict[Part, set[int]] = {"pool": set(), "window": set()}
        self._coming: set[int] = set()  # of launches not read yet, or being loaded
        self._dropped: list[int] = []  # that no plan has dropped yet
        self._copied: list[tuple[int, int]] = []  # for which request, which payload
        self._next_name = 0
        self.promised = 0  # blocks of the pool set aside

    def free(self, part: Part) -> int:
        """Blocks that nobody has or was promised."""
        promised = self.promised if part == "pool" else 0
        return self._size[part] - len(self._held[part]) - promised

    def size(self, part: Part) -> int:
        """Blocks in all."""
        return self._size[part]

    def used(self, part: Part) -> int:
        """Blocks that hold a payload, or will."""
        return len(self._held[part])

    def holds(self, name: int) -> bool:
        """Whether a payload is in host memory, or on its way there."""
        return any(name in held for held in self._held.values())

    def new(self, part: Part, *, request: int | None = None) -> int:
        """Name a payload that is on its way into host memory.

        Args:
          request: submission index of the one it is copied for, if for one.
        """
        name, self._next_name = self._next_name, self._next_name + 1
        self._coming.add(name)
        self._held[part].add(name)
        if request is not None:
            self._copied.append((request, name))
        return name

    def hold(self, name: int, part: Part) -> None:
        """Keep a payload in this part too."""
        self._held[part].add(name)

    def let_go(self, name: int, part: Part) -> None:
        """Keep a payload in this part no longer; in neither, it is dropped."""
        if name not in self._held[part]:
            return
        self._held[part].remove(name)
        if not self.holds(name):
            self._dropped.append(name)
            self._coming.discard(name)

    def vanish(self, name: int) -> None:
        """A payload never came."""
        self._coming.discard(name)
        for held in self._held.values():
            held.discard(name)

    def came(self, names: Iterable[int]) -> None:
        """These payloads can be fetched."""
        self._coming.difference_update(names)

    def is_here(self, name: int) -> bool:
        """Whether a payload can be fetched."""
        return name not in self._coming

    def take_copied(self) -> list[tuple[int, int]]:
        """Payloads copied since the last call: (for which request, name)."""
        copied, self._copied = self._copied, []
        return copied

    @property
    def has_dropped(self) -> bool:
        """Whether a plan should let go of payloads."""
        return bool(self._dropped)

    def flush(self, plan: PlanBuilder) -> None:
        """Drop in this plan what was let go of."""
        plan.drop += self._dropped
        self._dropped.clear()
