"""Memory on the way to the device: never written to while it is read, and not made
anew without need."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxserve.device import state as device_state
from jaxserve.executors.staging import Buffers, Staging
from jaxserve.executors.transfers import Transfers
from jaxserve.models.hash_model import HashModel
from jaxserve.moves import Fetch, Moves
from tests.engine.harness import JAX

PAGES = {
    "k": jax.ShapeDtypeStruct((3 * 200, 4, 5), np.float32),  # three layers, 200 blocks
    "v": jax.ShapeDtypeStruct((200, 7), jax.numpy.bfloat16),
}


class Later:
    """Stands for an array that is there once it is said to be."""

    ready = False

    def is_ready(self) -> bool:
        return self.ready


def memory(buffers: Buffers) -> list[int]:
    """Where they lie."""
    return [rows.ctypes.data for rows in buffers.values()]


@pytest.mark.parametrize("size", [1, 8, 64])
def test_buffers_are_of_whole_blocks_that_a_device_takes_as_they_are(size: int) -> None:
    buffers = Staging(PAGES, 200).take(size)
    assert {group: rows.shape for group, rows in buffers.items()} == {
        "k": (size, 3, 4, 5),
        "v": (size, 1, 7),
    }
    assert {group: rows.dtype for group, rows in buffers.items()} == {
        group: pages.dtype for group, pages in PAGES.items()
    }
    assert all(start % 64 == 0 for start in memory(buffers))


def test_what_is_given_back_is_taken_again_and_nobody_shares() -> None:
    staging = Staging(PAGES, 200)
    first, second = staging.take(8), staging.take(8)
    assert not set(memory(first)) & set(memory(second))
    staging.give(first)
    assert memory(staging.take(8)) == memory(first)
    assert not set(memory(staging.take(8))) & set(memory(first) + memory(second))


def test_sizes_are_apart() -> None:
    staging = Staging(PAGES, 200)
    staging.give(staging.take(8))
    assert len(staging.take(64)["k"]) == 64
    assert len(staging.take(8)["k"]) == 8


def test_what_is_still_read_is_not_taken_again() -> None:
    staging, after, other = Staging(PAGES, 200), Later(), Later()
    read, held = staging.take(8), staging.take(8)
    staging.give(read, after)
    staging.give(held, other)
    new = [staging.take(8) for _ in range(3)]
    taken = {start for buffers in new for start in memory(buffers)}
    assert not taken & set(memory(read) + memory(held))
    after.ready = True
    assert memory(staging.take(8)) == memory(read)
    assert not set(memory(staging.take(8))) & set(memory(held))


@pytest.mark.parametrize(("size", "kept"), [(8, 16), (64, 2), (100, 1), (150, 1)])
def test_no_more_is_kept_than_128_blocks_of_a_size_or_one(size: int, kept: int) -> None:
    staging = Staging(PAGES, 200)
    all_of_it = [staging.take(size) for _ in range(kept + 2)]
    for buffers in all_of_it:
        staging.give(buffers)
    old = {start for buffers in all_of_it for start in memory(buffers)}
    again = [staging.take(size) for _ in range(kept + 2)]
    assert sum(set(memory(buffers)) <= old for buffers in again) == kept


def test_no_more_is_kept_than_the_device_could_take() -> None:
    pages = {"k": jax.ShapeDtypeStruct((20, 3), np.float32)}
    staging = Staging(pages, 20)
    all_of_it = [staging.take(8) for _ in range(4)]
    for buffers in all_of_it:
        staging.give(buffers)
    again = [staging.take(8) for _ in range(4)]
    assert sum(memory(b) in [memory(old) for old in all_of_it] for b in again) == 2


def test_warm_memory_is_all_that_is_kept() -> None:
    staging = Staging(PAGES, 200)
    staging.give(staging.take(64))
    staging.warm_up(64)
    staging.warm_up(64)
    two = [staging.take(64), staging.take(64)]
    for buffers in two:
        staging.give(buffers)
    again = [staging.take(64) for _ in range(3)]
    assert sum(memory(b) in [memory(warm) for warm in two] for b in again) == 2


def test_a_snapshot_has_what_was_staged_whatever_its_memory_is_used_for_then() -> None:
    model, shape = HashModel(), JAX.shape(64)
    transfers, state = Transfers(model, shape), device_state.init(model, shape)
    before = state.pool.num_free
    payloads = {name: {"ids": np.full((1, 4), name, np.int32)} for name in (5, 6)}
    transfers.restore(transfers.snapshot() | {"payloads": payloads})
    state, _ = transfers.settle(state, Moves(fetch=(Fetch(0, 0, (5,)),)), before)
    saved = transfers.snapshot()
    moves = Moves(fetch=(Fetch(1, 0, (6,)),), cancel=(0,))
    transfers.settle(state, moves._replace(fetch=()), before)
    transfers.settle(state, moves._replace(cancel=()), before)
    now = transfers.snapshot()
    (((then,),), ((later,),)) = saved["staged"].values(), now["staged"].values()
    assert then["ids"][0].tolist() == [[5] * 4] and later["ids"][0].tolist() == [
        [6] * 4
    ]
