"""Payloads in host memory: kept apart, whole, and in the order that is asked for."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.kv_tiers.host_pool import HostPool


def blocks(first: int, count: int) -> dict[str, np.ndarray]:
    """Two groups of blocks [fold, count, ...], all of whose numbers differ."""
    k = np.arange(first, first + 2 * count * 3).reshape(2, count, 3)
    v = -np.arange(first, first + count * 2).reshape(1, count, 2, 1).astype(np.float32)
    return {"k": k, "v": v}


def test_what_is_put_can_be_had_by_name_in_any_order() -> None:
    pool, both = HostPool(), blocks(1, 4)
    pool.put([7, 3, 9], both)  # the fourth is padding
    assert len(pool) == 3
    out = pool.get([9, 7], 2)
    np.testing.assert_array_equal(out["k"], both["k"][:, [2, 0]], strict=True)
    np.testing.assert_array_equal(out["v"], both["v"][:, [2, 0]], strict=True)
    np.testing.assert_array_equal(pool.one(3)["k"], both["k"][:, 1], strict=True)


def test_what_is_had_is_padded_with_zeros() -> None:
    pool, one = HostPool(), blocks(1, 1)
    pool.put([0], one)
    out = pool.get([0], 3)
    assert out["k"].shape == (2, 3, 3) and out["v"].shape == (1, 3, 2, 1)
    np.testing.assert_array_equal(out["k"][:, :1], one["k"], strict=True)
    assert not out["k"][:, 1:].any() and not out["v"][:, 1:].any()


def test_a_payload_is_a_copy() -> None:
    pool, source = HostPool(), blocks(1, 2)
    expected = source["k"][:, 1].copy()
    pool.put([0, 1], source)
    source["k"][:] = 0
    out = pool.get([1], 1)
    np.testing.assert_array_equal(out["k"][:, 0], expected, strict=True)
    out["k"][:] = 0
    np.testing.assert_array_equal(pool.one(1)["k"], expected, strict=True)


def test_a_block_that_was_read_is_as_one_that_was_copied() -> None:
    pool, both = HostPool(), blocks(1, 2)
    pool.put([0], both)
    pool.add(5, {group: rows[:, 1] for group, rows in both.items()})
    np.testing.assert_array_equal(pool.get([0, 5], 2)["v"], both["v"], strict=True)


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
