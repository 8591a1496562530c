"""Checked CPU attention refuses what it would read or write outside the arrays."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from pallas_kernels import paged_attention, rotary_attention
from tests.kernels.batches import Shape, make_batch
from tests.kernels.marks import needs_cpu_kernels
from tests.kernels.rotary_batches import NOWHERE, make_kv_batch

pytestmark = needs_cpu_kernels
SHAPE = Shape(tokens=16, rows=4, columns=5, kv_heads=2, groups=2, head_size=32)
NUM_PAGES = 22


def _jitted(attend):
    """Traced anew: the variable is read when a program is traced."""
    options = {"scale": 0.125, "implementation": "cpu"}
    return jax.jit(lambda *args: attend(*args, **options))


@pytest.fixture
def checked(monkeypatch):
    monkeypatch.setenv("PALLAS_KERNELS_CHECKED", "1")


@pytest.fixture
def batch():
    """Two decode rows, one of them idle, and a chunk of 10; row 3 is padding."""
    return make_batch(SHAPE, [1, 1, 10], [50, 0, 33])


def _with(array, at, value):
    array = array.copy()
    array[at] = value
    return array


@pytest.mark.parametrize(
    ("field", "at", "value", "message"),
    [
        ("table", (0, 3), NUM_PAGES, r"table must name pages.*it names page 22\b"),
        ("table", (2, 2), -7, r"table must name pages.*it names page -7\b"),
        ("table", (2, 0), 2**31 - 1, r"table must name pages.*names page 2147483647\b"),
        ("kv_lens", 0, -1, r"kv_lens must be 0, or from .*it has -1\b"),
        ("kv_lens", 0, 81, r"kv_lens must be 0, or .*up to M . B; it has 81\b"),
        ("kv_lens", 2, 9, r"kv_lens must be 0, or from .*query tokens.*it has 9\b"),
        ("cu_q_lens", 0, 1, r"cu_q_lens must start at 0.*it has 1\b"),
        ("cu_q_lens", 2, 0, r"cu_q_lens must .*never fall.*it has 0\b"),
        ("cu_q_lens", 4, 17, r"cu_q_lens must .*within the token axis; it has 17\b"),
    ],
)
@pytest.mark.usefixtures("checked")
def test_a_batch_that_reads_outside_the_arrays_is_refused(
    field, at, value, message, batch
):
    attend = _jitted(paged_attention)
    wrong = batch._replace(**{field: _with(getattr(batch, field), at, value)})
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(attend(*wrong))
    jax.block_until_ready(attend(*batch))  # the next call is none the worse


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("page_ids", -3, r"page_ids must not be negative; there is -3\b"),
        ("offsets", 16, r"offsets must be in \[0, B\); there is 16\b"),
        ("offsets", -1, r"offsets must be in \[0, B\); there is -1\b"),
    ],
)
@pytest.mark.usefixtures("checked")
def test_kv_that_is_written_outside_the_pages_is_refused(field, value, message, batch):
    batch = make_kv_batch(batch)
    wrong = batch._replace(**{field: _with(getattr(batch, field), 11, value)})
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(_jitted(rotary_attention)(*wrong))


@pytest.mark.usefixtures("checked")
def test_a_rotary_batch_is_checked_as_any_other(batch):
    batch = make_kv_batch(batch)
    wrong = batch._replace(kv_lens=_with(batch.kv_lens, 0, -1))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"kv_lens .*it has"):
        jax.block_until_ready(_jitted(rotary_attention)(*wrong))


@pytest.mark.usefixtures("checked")
def test_what_no_kernel_reads_may_be_anything(batch):
    """Columns past a row's KV, and offsets of tokens that write nothing."""
    batch = make_kv_batch(batch)
    table = batch.table.copy()
    table[0, 4], table[1], table[2, 3:], table[3] = -5, NOWHERE, NUM_PAGES, -1
    assert batch.page_ids[1] == NOWHERE
    offsets = _with(batch.offsets, 1, 999)
    attend = _jitted(rotary_attention)
    actual = attend(*batch._replace(table=table, offsets=offsets))
    jax.tree.map(np.testing.assert_array_equal, actual, attend(*batch))


@pytest.mark.parametrize("attend", [paged_attention, rotary_attention])
@pytest.mark.parametrize("value", ["0", ""])
def test_checks_change_no_bit(attend, value, batch, monkeypatch):
    arguments = batch if attend is paged_attention else make_kv_batch(batch)
    outs = []
    for setting in ("1", value):
        monkeypatch.setenv("PALLAS_KERNELS_CHECKED", setting)
        outs.append(_jitted(attend)(*arguments))
    jax.tree.map(np.testing.assert_array_equal, *outs)
