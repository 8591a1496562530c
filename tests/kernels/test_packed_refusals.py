"""What packed weights are not for, and what is not packed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import packed
from pallas_kernels.packed import pack
from tests.kernels.marks import needs_cpu_kernels

pytestmark = needs_cpu_kernels


def test_a_gated_weight_is_for_gated_linear_alone():
    weight = jnp.zeros((1, 16, 64))
    x, y = jnp.zeros((2, 16)), jnp.zeros((2, 64))
    plain, gated = pack(weight), pack(weight, gated=True)
    for call in (
        lambda: packed.gated_linear(x, plain, 0),
        lambda: packed.linear(x, gated, 0),
        lambda: packed.add_linear(y, x, gated, 0),
    ):
        with pytest.raises(ValueError, match="gated="):
            call()


@pytest.mark.parametrize(
    ("inner", "columns", "dtype"),
    [(16, 48, jnp.float32), (24, 32, jnp.float32), (48, 32, jnp.bfloat16)],
)
def test_shapes_that_do_not_fall_into_panels_are_refused(inner, columns, dtype):
    with pytest.raises(NotImplementedError, match=f"{inner} x {columns} weights"):
        pack(jnp.zeros((1, inner, columns), dtype))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.int8])
def test_dtypes_that_no_kernel_multiplies_are_refused(dtype):
    with pytest.raises(NotImplementedError, match=jnp.dtype(dtype).name):
        pack(jnp.zeros((1, 16, 32), dtype))


def test_rows_are_of_one_plain_weight():
    """A gated one holds its columns in another order, and a stack several of each."""
    for weight in (
        pack(jnp.zeros((1, 16, 64)), gated=True),
        pack(jnp.zeros((2, 16, 64))),
    ):
        with pytest.raises(ValueError, match="rows are of one plain weight"):
            weight.rows(jnp.arange(3))


@pytest.mark.parametrize(
    ("layer", "field"),
    [
        (lambda w, g, s: packed.linear(s(1, 16), w, 0), "x"),
        (lambda w, g, s: packed.gated_linear(s(1, 64), g, 0), "x"),
        (lambda w, g, s: packed.add_linear(s(2, 64), s(1, 32), w, 0), "y"),
        (lambda w, g, s: packed.add_linear(s(1, 32), s(1, 32), w, 0), "y"),
        (lambda w, g, s: packed.rms_norm(s(1, 16), s(1, 16), 0, 1e-5, w), "x"),
        (lambda w, g, s: packed.rms_norm(s(1, 32), s(1, 16), 0, 1e-5, w), "x"),
    ],
)
def test_rows_of_another_length_are_refused(layer, field):
    """The weights are 32 x 64."""
    plain, gated = (
        pack(jnp.zeros((1, 32, 64))),
        pack(jnp.zeros((1, 32, 64)), gated=True),
    )
    with pytest.raises(ValueError, match=f"{field} of .* must be"):
        layer(plain, gated, lambda *shape: jnp.zeros(shape))


@pytest.mark.parametrize("layer", [-1, 2, 7])
def test_a_layer_that_does_not_exist_is_refused(layer):
    weight = pack(jnp.ones((2, 16, 64)))
    x, scales = jnp.ones((1, 16)), jnp.ones((2, 16))
    with pytest.raises(jax.errors.JaxRuntimeError, match="layer must be from 0 to L"):
        jax.block_until_ready(packed.linear(x, weight, layer))
    with pytest.raises(jax.errors.JaxRuntimeError, match="layer must be from 0 to L"):
        jax.block_until_ready(packed.rms_norm(x, scales, layer, 1e-5, weight))
