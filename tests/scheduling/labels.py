"""Blocks with names, and plans, for tests of what is kept below the device.

A block is named by its path: "ab" follows "a", and is followed by "abc" and "abd".
"""

from __future__ import annotations

from jaxserve.config import EngineConfig
from jaxserve.moves import Erase, Label, Moves, Spill
from jaxserve.scheduling.plan_builder import PlanBuilder
from jaxserve.scheduling.tiers import Place, Tiers

SHAPE = EngineConfig(
    max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16, block_size=4
).shape(16)
S, M, H = SHAPE.max_slots, SHAPE.max_blocks_per_slot, SHAPE.num_handles


def key(path: str) -> bytes:
    """16 bytes, as of a digest."""
    return path.encode().ljust(16, b".")


def keys(path: str) -> list[bytes]:
    """Of the whole chain: "a", "ab", "abc"."""
    return [key(path[: end + 1]) for end in range(len(path))]


def label(path: str) -> Label:
    """What names the block of a path."""
    return Label(key(path), key(path[:-1]), len(path) - 1)


def handle_spill(name: int, handle: int) -> Spill:
    """The order to copy the block of a handle."""
    return Spill(name, S, M, handle)


def on_host(*names: int) -> list[Place]:
    """Places of payloads."""
    return [Place("host", name) for name in names]


def on_disk(*paths: str) -> list[Place]:
    """Places of files."""
    return [Place("disk", label=label(path)) for path in paths]


def erased(*paths: str, after: int = 0) -> tuple[Erase, ...]:
    """Orders to erase files, after so many saves."""
    return tuple(Erase(label(path), after) for path in paths)


def plan() -> PlanBuilder:
    """An empty one."""
    return PlanBuilder(SHAPE, 16)


def flushed(tiers: Tiers, built: PlanBuilder) -> Moves:
    """What a plan moves, once it is done."""
    tiers.flush(built)
    return built.moves


def but_erasing(moves: Moves, *labels: Label) -> Moves:
    """Moves without erasures of these: what a failure left on disk nobody knows, and
    to erase it once more does no harm."""
    erase = tuple(each for each in moves.erase if each.label not in labels)
    return moves._replace(erase=erase)
