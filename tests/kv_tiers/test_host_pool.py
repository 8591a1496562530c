"""Payloads in host memory: kept apart, whole, and in the order that is asked for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from jaxserve.kv_tiers.host_pool import HostPool, Payload


def blocks(first: int, count: int) -> dict[str, np.ndarray]:
    """Two groups of blocks [count, fold, ...], all of whose numbers differ."""
    k = np.arange(first, first + 2 * count * 3).reshape(count, 2, 3)
    v = -np.arange(first, first + count * 2).reshape(count, 1, 2, 1).astype(np.float32)
    return {"k": k, "v": v}


def got(pool: HostPool, names: Sequence[int], size: int) -> Payload:
    """Blocks that begin with those of these names; the others are 99."""
    out = {group: np.full_like(rows, 99) for group, rows in blocks(0, size).items()}
    pool.get(names, out)
    return out


def test_what_is_put_can_be_had_by_name_in_any_order() -> None:
    pool, both = HostPool(), blocks(1, 4)
    pool.put([7, 3, 9], both)  # the fourth is padding
    assert len(pool) == 3
    out = got(pool, [9, 7], 2)
    np.testing.assert_array_equal(out["k"], both["k"][[2, 0]], strict=True)
    np.testing.assert_array_equal(out["v"], both["v"][[2, 0]], strict=True)
    np.testing.assert_array_equal(pool.one(3)["k"], both["k"][1], strict=True)


def test_what_follows_is_left_as_it_is() -> None:
    pool, one = HostPool(), blocks(1, 1)
    pool.put([0], one)
    out = got(pool, [0], 3)
    np.testing.assert_array_equal(out["k"][:1], one["k"], strict=True)
    assert (out["k"][1:] == 99).all() and (out["v"][1:] == 99).all()


def test_a_payload_is_a_copy() -> None:
    pool, source = HostPool(), blocks(1, 2)
    expected = source["k"][1].copy()
    pool.put([0, 1], source)
    source["k"][:] = 0
    out = got(pool, [1], 1)
    np.testing.assert_array_equal(out["k"][0], expected, strict=True)
    out["k"][:] = 0
    np.testing.assert_array_equal(pool.one(1)["k"], expected, strict=True)


def test_a_block_that_was_read_is_as_one_that_was_copied() -> None:
    pool, both = HostPool(), blocks(1, 2)
    pool.put([0], both)
    pool.add(5, {group: rows[1] for group, rows in both.items()})
    np.testing.assert_array_equal(got(pool, [0, 5], 2)["v"], both["v"], strict=True)


def test_what_is_dropped_is_gone() -> None:
    pool = HostPool()
    pool.put([0, 1, 2], blocks(1, 3))
    pool.drop([0, 2])
    assert len(pool) == 1
    for name in (0, 2):
        with pytest.raises(KeyError):
            pool.one(name)
    with pytest.raises(KeyError):
        pool.drop([0])
