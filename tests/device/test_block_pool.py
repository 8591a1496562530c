"""The block pool against an independent model, after each of thousands of edits."""

from __future__ import annotations

import dataclasses
import functools
import random
import re

import jax
import numpy as np
import pytest

from jaxserve.device import block_pool
from jaxserve.device.block_pool import BlockPool

S, M, P, H, R, K = 6, 4, 18, 21, 3, 6  # R < S and H > P, as pads of unequal size
MAX_NEW = 3

JITTED = {
    name: jax.jit(getattr(block_pool, name))
    for name in ("release", "adopt", "publish", "retire")
}
JITTED["grow"] = jax.jit(functools.partial(block_pool.grow, max_new=MAX_NEW))


def _padded(entries: list, size: int, padding: int | tuple[int, ...]) -> np.ndarray:
    assert len(entries) <= size
    return np.array([*entries, *[padding] * (size - len(entries))], np.int32)


def _edits(entries: list[tuple[int, int, int]]) -> np.ndarray:
    return _padded(entries, K, (S, M, H))


class Model:
    """Owners of every block, in Python; which block `grow` picks is read."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.pool = block_pool.init(P, S, M, H)
        self.tables: list[list[int]] = [[] for _ in range(S)]
        self.cache: dict[int, int] = {}

    # What holds -----------------------------------------------------------------------

    def owners(self) -> list[int]:
        count = [0] * P
        for block in [b for row in self.tables for b in row] + [*self.cache.values()]:
            count[block] += 1
        return count

    def unowned(self) -> set[int]:
        return {block for block, n in enumerate(self.owners()) if n == 0}

    def check(self) -> None:
        """The pool is what the model says, and the count formula holds."""
        pool = jax.device_get(self.pool)
        assert pool.refs.tolist() == self.owners()
        free = pool.free[: pool.num_free].tolist()
        assert len(free) == len(set(free)) and set(free) == self.unowned()
        assert pool.held.tolist() == [len(row) for row in self.tables]
        for row, expected in zip(pool.table.tolist(), self.tables, strict=True):
            assert row == expected + [P] * (M - len(expected))
        assert pool.cache.tolist() == [self.cache.get(h, P) for h in range(H)]
        named = set(self.cache.values())
        private = sum(b not in named for row in self.tables for b in row)
        assert pool.num_free == P - private - len(self.cache)
        block_pool.check(self.pool)

    # Random edits, within what the host guarantees ------------------------------------

    def grow(self) -> None:
        left, want = len(self.unowned()), []
        for row in self.tables:
            new = min(self.rng.randint(-2, MAX_NEW), left, M - len(row))
            new = max(new, 0)
            left -= new
            # A slot that holds more than it wants is left alone.
            want.append(len(row) + new if new else self.rng.randint(0, len(row)))
        before = self.unowned()
        self.pool = JITTED["grow"](self.pool, np.array(want, np.int32))
        table = np.asarray(self.pool.table)
        for slot, row in enumerate(self.tables):
            for column in range(len(row), want[slot]):
                block = int(table[slot, column])
                assert block in before, "grow gave a block that has an owner"
                before.remove(block)
                row.append(block)

    def release(self) -> None:
        slots = self.rng.sample(range(S), self.rng.randint(0, R))
        self.pool = JITTED["release"](self.pool, _padded(slots, R, S))
        for slot in slots:
            self.tables[slot] = []

    def adopt(self) -> None:
        edits = []
        for slot in range(S):
            count = self.rng.randint(0, min(3, K - len(edits)))
            if not self.tables[slot] and self.cache:
                handles = self.rng.choices(sorted(self.cache), k=count)
                edits += [(slot, column, h) for column, h in enumerate(handles)]
        self.pool = JITTED["adopt"](self.pool, _edits(edits))
        for slot, _, handle in edits:
            self.tables[slot].append(self.cache[handle])

    def publish(self) -> None:
        named, edits = set(self.cache.values()), []
        holes = [h for h in range(H) if h not in self.cache]
        for slot, row in enumerate(self.tables):
            for column, block in enumerate(row):
                chosen = self.rng.random() < 0.4 and len(edits) < K
                if chosen and block not in named:
                    edits.append((slot, column, holes.pop(self.rng.randrange(2))))
                    named.add(block)
        self.pool = JITTED["publish"](self.pool, _edits(edits))
        for slot, column, handle in edits:
            self.cache[handle] = self.tables[slot][column]

    def retire(self) -> None:
        # A block that two slots share keeps its handle, or the formula would not hold.
        uses = [b for row in self.tables for b in row]
        able = [h for h, block in self.cache.items() if uses.count(block) < 2]
        handles = self.rng.sample(able, self.rng.randint(0, min(K, len(able))))
        self.pool = JITTED["retire"](self.pool, _padded(handles, K, H))
        for handle in handles:
            del self.cache[handle]


@pytest.mark.parametrize("seed", range(3))
def test_random_edits_agree_with_the_model_and_compile_once(seed: int) -> None:
    model = Model(seed)
    seen = dict.fromkeys(JITTED, 0)
    emptied = filled = 0
    for _ in range(900):
        name = model.rng.choice(["grow", "grow", "release", *JITTED])
        before = jax.device_get(model.pool)
        getattr(model, name)()
        seen[name] += not all(
            np.array_equal(a, b)
            for a, b in zip(
                jax.tree.leaves(before), jax.tree.leaves(model.pool), strict=True
            )
        )
        model.check()
        emptied += not model.unowned()
        filled += len(model.unowned()) == P
    assert min(seen.values()) > 10 and emptied > 20 and filled > 0, (
        f"the walk must reach both ends and every edit: {seen=} {emptied=} {filled=}"
    )
    assert {name: f._cache_size() for name, f in JITTED.items()} == dict.fromkeys(
        JITTED, 1
    )


def _busy() -> Model:
    """Every slot, and the last block, column and handle in use."""
    model = Model(0)
    for _ in range(200):
        model.grow()
        model.publish()
        if not model.unowned() and len(model.cache) > 3:
            break
        model.release()
    model.check()
    assert model.owners()[P - 1] > 0
    return model


def test_padding_writes_nothing_not_even_the_last_element() -> None:
    model = _busy()
    pool = jax.device_get(model.pool)
    padding = {
        "grow": [np.zeros(S, np.int32)],
        "release": [_padded([], R, S)],
        "adopt": [_edits([])],
        "publish": [_edits([])],
        "retire": [_padded([], K, H)],
        # Padding is known by dst alone: src and count may be anything.
    }
    assert padding.keys() == JITTED.keys()
    for name, arguments in padding.items():
        after = jax.device_get(JITTED[name](model.pool, *arguments))
        for field in dataclasses.fields(BlockPool):
            one, two = getattr(pool, field.name), getattr(after, field.name)
            assert np.array_equal(one, two), f"{name} of padding changed {field.name}"


def _shared() -> Model:
    """Slots 0, 1 and 2 share one block behind handle 3; slot 1 has one of its own."""
    model = Model(1)
    model.pool = JITTED["grow"](model.pool, _padded([1], S, 0))
    block = int(model.pool.table[0, 0])
    model.pool = JITTED["publish"](model.pool, _edits([(0, 0, 3)]))
    model.pool = JITTED["adopt"](model.pool, _edits([(1, 0, 3), (2, 0, 3)]))
    model.pool = JITTED["grow"](model.pool, _padded([0, 2], S, 0))
    own = int(model.pool.table[1, 1])
    model.tables = [[block], [block, own], [block], [], [], []]
    model.cache = {3: block}
    model.check()
    return model


@pytest.mark.parametrize("slots", [[0, 1], [1, 0], [0, 1, 2], [2]])
@pytest.mark.parametrize("retired", [False, True])
def test_several_owners_leave_in_one_call(slots: list[int], retired: bool) -> None:
    """Released together, a shared block is freed once, by its last owner alone."""
    model = _shared()
    if retired:  # without its handle, the last slot to go frees the block
        model.pool = JITTED["retire"](model.pool, _padded([3], K, H))
        model.cache = {}
    model.pool = JITTED["release"](model.pool, _padded(slots, R, S))
    for slot in slots:
        model.tables[slot] = []
    pool = jax.device_get(model.pool)
    assert pool.refs.tolist() == model.owners()
    free = pool.free[: pool.num_free].tolist()
    assert sorted(free) == sorted(model.unowned())
    block_pool.check(model.pool)


def test_two_handles_of_one_block_retire_together() -> None:
    model = _shared()
    model.pool = JITTED["publish"](model.pool, _edits([(1, 1, 16), (1, 1, 0)]))
    own = model.tables[1][1]
    model.cache |= {16: own, 0: own}
    assert jax.device_get(model.pool.refs).tolist() == model.owners()
    model.pool = JITTED["release"](model.pool, _padded([1], R, S))
    model.tables[1] = []
    assert own not in jax.device_get(model.pool.free)[: int(model.pool.num_free)]
    model.pool = JITTED["retire"](model.pool, _padded([16, 0], K, H))
    del model.cache[16], model.cache[0]
    model.check()


def test_every_block_can_be_had_at_once() -> None:
    model = Model(2)
    for want in ([3, 0, 3, 3, 3, 3], [3, 0, 4, 3, 4, 4]):
        model.pool = JITTED["grow"](model.pool, np.array(want, np.int32))
    pool = jax.device_get(model.pool)
    assert pool.num_free == 0
    assert sorted(pool.table[pool.table < P].tolist()) == list(range(P))
    block_pool.check(model.pool)


def _corruptions() -> dict[str, BlockPool]:
    pool = jax.device_get(_busy().pool)
    table, held, free = pool.table, pool.held, pool.free
    two = next(s for s in range(S) if held[s] >= 2)
    some = jax.device_get(_shared().pool)  # has free blocks
    handle = int(np.flatnonzero(pool.cache < P)[0])
    hole = int(np.flatnonzero(pool.cache == P)[0])

    def put(of: BlockPool, **fields: tuple) -> BlockPool:
        changed = {}
        for name, (at, value) in fields.items():
            changed[name] = np.array(getattr(of, name))
            changed[name][at] = value
        return dataclasses.replace(of, **changed)

    return {
        "an owner too few": put(pool, refs=(0, pool.refs[0] - 1)),
        "an owner too many": put(some, refs=(some.free[0], 1)),
        "an owned block on the stack": dataclasses.replace(pool, num_free=np.int32(1)),
        "a block twice on the stack": put(some, free=(0, some.free[1])),
        "a block lost from the stack": dataclasses.replace(
            some, num_free=some.num_free - 1
        ),
        "a hole among held columns": put(pool, table=((two, 0), P)),
        "a block past the held columns": put(
            some, table=((3, 0), some.free[0]), refs=(some.free[0], 1)
        ),
        "two columns, one block": put(pool, table=((two, 1), table[two, 0])),
        "a handle of a free block": put(some, cache=(hole, some.free[0])),
        "a handle forgotten": put(pool, cache=(handle, P)),
        "too many columns held": put(some, held=(3, 1)),
        "too few columns held": put(pool, held=(two, held[two] - 1)),
        "the stack holds no block": put(some, free=(0, P)),
        "the count is past the stack": dataclasses.replace(
            some, num_free=np.int32(len(free))
        ),
    }


def test_check_finds_every_kind_of_corruption() -> None:
    for kind, pool in _corruptions().items():
        with pytest.raises(AssertionError) as error:
            block_pool.check(pool)
        assert re.search(r"owners|free stack|held", str(error.value)), kind
