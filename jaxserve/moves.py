"""KV blocks that cross between the device and the host, around launches and by name.

Owns the orders and their order. Never sees a payload's contents or a physical block.
Axes: S slots, M columns per slot, H handles.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Spill(NamedTuple):
    """A block to be copied to the host, as the launch before left it."""

    name: int  # of the payload, never used again
    slot: int  # and column; S where a handle names the block
    column: int
    handle: int  # H where slot and column name the block


class Restore(NamedTuple):
    """Columns that a slot gets back from the host, beside those it adopted.

    They are new blocks; afterwards the slot has `length` KV rows and decodes `last`.
    """

    slot: int
    first: int  # column of the first payload
    names: tuple[int, ...]  # payloads, a column each; they must have arrived
    length: int
    last: int  # token id to be fed next; any where its prompt is not complete


class Moves(NamedTuple):
    """KV blocks that cross between device and host around one launch, in this order.

    Spills before the launch's edits, which may free what they read; restores after the
    launch, which frees what they take. A payload that is to be restored is fetched
    first, and takes no device block until it has arrived.
    """

    spill: tuple[Spill, ...] = ()
    restore: tuple[Restore, ...] = ()
    fetch: tuple[int, ...] = ()  # payloads to be brought in while launches run
    drop: tuple[int, ...] = ()  # payloads not needed after these restores


STILL = Moves()


class Transferred(NamedTuple):
    """A copy between device and host that has ended."""

    way: Literal["out", "in"]
    names: tuple[int, ...]  # payloads
    seconds: float
    waited_s: float  # for others on the link, before it
