"""`rotary_attention`: rotates, writes KV in its place and only there, and attends."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from pallas_kernels import cpu, rotary_attention
from tests.kernels import numpy_oracle
from tests.kernels.batches import Shape, make_batch
from tests.kernels.marks import needs_cpu_kernels
from tests.kernels.rotary_batches import NOWHERE, make_kv_batch, rotated, written

CPU = pytest.param("cpu", marks=needs_cpu_kernels)


def _batch(dtype="float32", head_size=64):
    shape = Shape(40, 7, 9, 12, 2, 3, head_size, dtype, dtype)
    return make_kv_batch(make_batch(shape, [1, 1, 1, 20, 9], [70, 1, 0, 84, 9]))


@functools.cache
def _jitted(implementation, window=None):
    return jax.jit(
        functools.partial(
            rotary_attention, scale=0.125, window=window, implementation=implementation
        )
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("implementation", "head_size"),
    [
        *[pytest.param("cpu", n, marks=needs_cpu_kernels) for n in (32, 48, 64, 80)],
        pytest.param("cpu", 128, marks=needs_cpu_kernels),
        ("xla", 64),
        ("reference", 64),
        (None, 64),
        (None, 24),
    ],
)
def test_it_rotates_writes_and_attends(implementation, head_size, dtype):
    batch = _batch(dtype, head_size)
    out, pages = _jitted(implementation)(*batch)
    assert out.dtype == pages.dtype == dtype
    out, pages = np.asarray(out, np.float32), np.asarray(pages, np.float32)

    # A step of bf16, or a few roundings of float32.
    expected_pages = written(batch).astype(np.float32)
    rtol = 2.0**-7 if dtype == "bfloat16" else 1e-6
    np.testing.assert_allclose(pages, expected_pages, rtol=rtol, atol=1e-6)
    own = batch.page_ids < NOWHERE
    kept = np.ones(pages.shape[:2], bool)
    kept[batch.page_ids[own], batch.offsets[own]] = False
    np.testing.assert_array_equal(pages[kept], batch.pages[kept].astype(np.float32))
    np.testing.assert_array_equal(pages[..., 1, :], expected_pages[..., 1, :])

    expected = numpy_oracle.paged_attention(
        rotated(batch), expected_pages, *batch[6:-1], scale=0.125
    )
    defined = ~np.isnan(expected)
    assert np.isfinite(out).all()
    atol = 3e-2 if dtype == "bfloat16" else 4e-6
    np.testing.assert_allclose(out[defined], expected[defined], rtol=0, atol=atol)


@pytest.mark.parametrize("implementation", [CPU, "xla"])
def test_a_token_may_see_a_window(implementation):
    batch = _batch()
    out, _ = _jitted(implementation, 30)(*batch)
    expected = numpy_oracle.paged_attention(
        rotated(batch), written(batch), *batch[6:-1], scale=0.125, window=30
    )
    defined = ~np.isnan(expected)
    np.testing.assert_allclose(
        np.asarray(out)[defined], expected[defined], rtol=0, atol=4e-6
    )


@pytest.mark.parametrize("implementation", [CPU, "xla"])
def test_page_ids_past_the_pool_write_nothing(implementation):
    batch = _batch()
    nowhere = np.full_like(batch.page_ids, len(batch.pages))
    nowhere[::2] = NOWHERE
    pages = np.nan_to_num(batch.pages)
    _, after = _jitted(implementation)(*batch._replace(page_ids=nowhere, pages=pages))
    np.testing.assert_array_equal(after, pages)


def test_without_kernels_the_default_is_composed_of_xla(monkeypatch):
    batch = _batch()
    expected = _jitted("xla")(*batch)
    monkeypatch.setattr(cpu, "unavailable", lambda: "switched off")
    attend = functools.partial(rotary_attention, scale=0.125)
    actual = jax.jit(lambda *args: attend(*args))(*batch)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    with pytest.raises(NotImplementedError, match="switched off"):
        attend(*batch, implementation="cpu")


@pytest.mark.parametrize(
    ("field", "shape", "dtype"),
    [
        ("cos", (40, 16), "float32"),
        ("cos", (40, 32), "bfloat16"),
        ("sin", (39, 32), "float32"),
        ("sin", (1, 32), "float32"),
        ("page_ids", (39,), "int32"),
        ("offsets", (1,), "int32"),
        ("qkv", (40, 9, 64), "float32"),
        ("qkv", (40, 4, 64), "float32"),
        ("qkv", (40, 10, 64), "bfloat16"),
    ],
)
def test_arguments_of_another_shape_or_dtype_are_named(field, shape, dtype):
    wrong = _batch()._replace(**{field: jax.ShapeDtypeStruct(shape, dtype)})
    with pytest.raises(ValueError, match=f"^{field} of "):
        jax.eval_shape(functools.partial(rotary_attention, scale=0.125), *wrong)
