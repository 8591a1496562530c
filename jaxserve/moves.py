"""What crosses between device, host and disk around a launch, beside its plan.

Owns the orders and their order, and what is told of them when they are done: KV blocks,
by name, and the tables of slots. Never sees a payload's contents or a physical block.
Axes: S slots, M columns per slot, H handles.

A *payload* is a copy of one block in host memory; its name is never used again.
"""

from __future__ import annotations

from collections import deque
from typing import Literal, NamedTuple

from jaxserve.processors import Setup

NO_KEY = b""


class Label(NamedTuple):
    """Which tokens a block holds, and for whom: what names it below the device."""

    key: bytes  # of the tokens up to the block's end
    parent: bytes  # key of those up to its start; NO_KEY: only this engine reads it
    column: int = 0  # how many blocks precede it
    weight_version: int = 0
    salt_tag: bytes = b""  # digest of the cache salt; empty without one


class Spill(NamedTuple):
    """A block to be copied to the host, as the launch before left it."""

    name: int  # of the payload
    slot: int  # and column; S where a handle names the block
    column: int
    handle: int  # H where slot and column name the block


class Fetch(NamedTuple):
    """Payloads for consecutive columns, to be brought to the device together."""

    number: int  # of the fetch, never used again
    first: int  # column of the first payload
    names: tuple[int, ...]

    @property
    def end(self) -> int:
        """The column after the last."""
        return self.first + len(self.names)


class Restore(NamedTuple):
    """Columns that a slot gets beside those it adopted: back from the host, or as the
    copy of another's.

    They are new blocks; afterwards the slot has `length` KV rows and decodes `last`.
    """

    slot: int
    first: int  # column; those before it are there
    # They bring the others, each the columns behind the one before; what they bring
    # before `first` is not needed.
    fetches: tuple[Fetch, ...]
    length: int
    last: int  # token id to be fed next; any where its prompt is not complete
    # A slot whose column `first` is copied instead, in part: the request forks it.
    source: int | None = None


class Save(NamedTuple):
    """A payload to be written to disk; it stays in host memory."""

    name: int
    label: Label


class Load(NamedTuple):
    """A payload to be read from disk into host memory."""

    name: int  # a new one
    label: Label


class Erase(NamedTuple):
    """What is on disk and not needed."""

    label: Label
    after: int = 0  # saves of the same launch; for the others it makes room


class Moves(NamedTuple):
    """What crosses around one launch, in this order.

    The tables of the slots that it takes are written before it.
    Spills before the launch's edits, which may free what they read; restores after the
    launch, which frees what they take. A payload that is to be restored is loaded and
    then fetched first, and takes no device block until it has arrived.
    """

    setup: tuple[Setup, ...] = ()
    spill: tuple[Spill, ...] = ()
    restore: tuple[Restore, ...] = ()
    fetch: tuple[Fetch, ...] = ()
    cancel: tuple[int, ...] = ()  # fetches that nobody will restore
    save: tuple[Save, ...] = ()  # to disk, while launches run
    load: tuple[Load, ...] = ()  # from disk, while launches run
    erase: tuple[Erase, ...] = ()  # between the saves, by `after`
    drop: tuple[int, ...] = ()  # payloads not needed after all of these


STILL = Moves()


def writes(moves: Moves) -> list[Save | Erase]:
    """What is written to disk and erased, in order."""
    orders: list[Save | Erase] = []
    gone = deque(moves.erase)
    for i, save in enumerate(moves.save):
        while gone and gone[0].after <= i:
            orders.append(gone.popleft())
        orders.append(save)
    return orders + list(gone)


Way = Literal["out", "in", "save", "load"]
"""Device to host, host to device, host to disk, disk to host."""


class Transferred(NamedTuple):
    """A copy that has ended."""

    way: Way
    names: tuple[int, ...]  # payloads
    seconds: float
    waited_s: float  # for others on the same way, before it
    fetch: int = -1  # its number, of the way "in"


class Arrived(NamedTuple):
    """What became of orders, since the last time it was told."""

    fetches: tuple[int, ...] = ()  # numbers of those that can be restored
    done: tuple[int, ...] = ()  # payloads that have been loaded or saved
    failed: tuple[int, ...] = ()  # payloads that could not be loaded or saved
    found: tuple[Label, ...] = ()  # on disk, written by others
    gone: tuple[bytes, ...] = ()  # keys no longer on disk, removed by others


NOTHING = Arrived()
