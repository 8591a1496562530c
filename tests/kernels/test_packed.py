"""Packed weights: what `pack` holds, and layers that read them, against NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels import packed
from pallas_kernels.packed import pack
from tests.kernels.marks import needs_cpu_kernels

ROWS = 15  # a tile of 12 and more
pytestmark = needs_cpu_kernels
DTYPES = [jnp.float32, jnp.bfloat16]


def _weights(layers, inner, columns, dtype, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((layers, inner, columns), np.float32).astype(dtype)


def _rows(*shape):
    return np.random.default_rng(1).standard_normal(shape, np.float32)


def _product(x, weight):
    """f64 of x W, with x rounded to the weights' dtype as the kernels do."""
    return x.astype(weight.dtype).astype(np.float64) @ weight.astype(np.float64)


def _swiglu(x, weight):
    gate, up = np.split(_product(x, weight), 2, axis=1)
    return gate / (1 + np.exp(-gate)) * up


def _gelu_tanh(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _check(actual, expected, x, weight):
    """Compare, with room for a few roundings of the sums' largest parts."""
    room = 8 * 2.0**-24 * _product(np.abs(x), np.abs(weight))
    assert actual.dtype == jnp.float32
    assert (np.abs(np.asarray(actual, np.float64) - expected) <= room).all()


@pytest.mark.parametrize(
    ("inner", "columns", "dtype"),
    [
        (inner, columns, dtype)
        for dtype in DTYPES
        for inner, columns in [(32, 32), (96, 96), (288, 320)]
    ],
)
class TestSizes:
    def test_linear_multiplies(self, inner, columns, dtype):
        weight = _weights(1, inner, columns, dtype)
        x = _rows(ROWS, inner)
        actual = packed.linear(x, pack(jnp.asarray(weight)), 0)
        _check(actual, _product(x, weight[0]), x, weight[0])

    def test_add_linear_adds(self, inner, columns, dtype):
        weight = _weights(1, inner, columns, dtype)
        x, y = _rows(ROWS, inner), _rows(ROWS, columns)
        actual = packed.add_linear(jnp.asarray(y), x, pack(jnp.asarray(weight)), 0)
        _check(actual, y + _product(x, weight[0]), x, weight[0])

    def test_gated_linear_gates_with_silu(self, inner, columns, dtype):
        weight = _weights(1, inner, columns, dtype)
        x = _rows(ROWS, inner) / np.float32(inner**0.5)
        actual = packed.gated_linear(x, pack(jnp.asarray(weight), gated=True), 0)
        assert actual.dtype == dtype
        rounding = 2.0**-8 if dtype == jnp.bfloat16 else 2.0**-18
        np.testing.assert_allclose(
            np.asarray(actual, np.float64),
            _swiglu(x, weight[0]),
            rtol=rounding,
            atol=2.0**-18,
        )

    def test_gated_linear_gates_with_gelu(self, inner, columns, dtype):
        weight = _weights(1, inner, columns, dtype)
        x = _rows(ROWS, inner) / np.float32(inner**0.5)
        actual = packed.gated_linear(
            x, pack(jnp.asarray(weight), gated=True), 0, activation="gelu_tanh"
        )
        assert actual.dtype == dtype
        gate, up = np.split(_product(x, weight[0]), 2, axis=1)
        rounding = 2.0**-8 if dtype == jnp.bfloat16 else 2.0**-18
        np.testing.assert_allclose(
            np.asarray(actual, np.float64),
            _gelu_tanh(gate) * up,
            rtol=rounding,
            atol=2.0**-18,
        )

    def test_rows_are_the_columns(self, inner, columns, dtype):
        weight = _weights(1, inner, columns, dtype)
        tokens = np.array([columns - 1, 0, 7, 31, 7, columns // 2], np.int32)
        actual = jax.jit(lambda w, t: w.rows(t))(pack(jnp.asarray(weight)), tokens)
        assert actual.dtype == dtype
        np.testing.assert_array_equal(actual, weight[0].T[tokens])


@pytest.mark.parametrize("dtype", DTYPES)
def test_packing_takes_no_more_memory(dtype):
    weight = jnp.asarray(_weights(2, 64, 96, dtype))
    assert pack(weight).words.nbytes == weight.nbytes
    assert pack(weight).dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scan_takes_layer_after_layer(dtype):
    """The layer's number is traced; each layer has other weights."""
    layers, size = 3, 64
    mix, gate, down = (
        _weights(layers, size, n * size, dtype, seed) / np.array(8, dtype)
        for seed, n in enumerate((1, 2, 1))
    )
    x = _rows(ROWS, size)

    @jax.jit
    def forward(x, mix, gate, down):
        def layer(x, i):
            y = packed.linear(x, mix, i)
            return packed.add_linear(x, packed.gated_linear(y, gate, i), down, i), None

        return lax.scan(layer, x, jnp.arange(layers))[0]

    weights = (pack(jnp.asarray(w), gated=w is gate) for w in (mix, gate, down))
    actual = forward(x, *weights)
    expected = x.astype(np.float64)
    for i in range(layers):
        gated = _swiglu(_product(expected, mix[i]), gate[i])
        expected = expected + _product(gated, down[i])
    atol = 5e-2 if dtype == jnp.bfloat16 else 1e-5
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


def test_add_linear_adds_in_place():
    weight = jax.eval_shape(lambda: jnp.zeros((1, 2, 64, 32)))
    weight = packed.Packed(weight, gated=False)
    y = jax.ShapeDtypeStruct((256, 64), jnp.float32)
    add = jax.jit(lambda y, w: packed.add_linear(y, y, w, 0), donate_argnums=0)
    memory = add.lower(y, weight).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 256 * 64 * 4


@pytest.mark.parametrize("rows", [0, 1, 5, 14, ROWS, 99])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_do_not_count_change_nothing(dtype, rows):
    """The leading ones have the bits that they have without the others."""
    plain, gated = (_weights(2, 96, 96, dtype), _weights(2, 96, 64, dtype))
    weight = pack(jnp.asarray(plain))
    pair = pack(jnp.asarray(gated), gated=True)
    x, y, scales = _rows(ROWS, 96), _rows(ROWS, 96) + 1, _rows(2, 96)
    added = np.asarray(packed.add_linear(y, x, weight, 1, rows))
    np.testing.assert_array_equal(added[rows:], y[rows:])
    for layer in (
        lambda x, *rows: packed.linear(x, weight, 1, *rows),
        lambda x, *rows: packed.add_linear(x + 1, x, weight, 1, *rows),
        lambda x, *rows: packed.gated_linear(x, pair, 1, *rows),
        lambda x, *rows: packed.gated_linear(x, pair, 1, *rows, activation="gelu_tanh"),
        lambda x, *rows: packed.rms_norm(x, scales, 1, 1e-5, weight, *rows),
    ):
        x[rows:] = np.nan
        actual = layer(x, rows)
        assert actual.shape[0] == ROWS
        np.testing.assert_array_equal(actual[:rows], layer(x[:rows]))


def test_no_rows_give_no_rows():
    weight = pack(jnp.asarray(_weights(1, 16, 32, jnp.float32)))
    assert packed.linear(jnp.zeros((0, 16)), weight, 0).shape == (0, 32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_scales_rows_to_unit_mean_square(dtype):
    weight = pack(jnp.asarray(_weights(1, 96, 32, dtype)))
    x, scales = _rows(ROWS, 96) * np.float32(30), _rows(3, 96)
    x[4] = 0
    actual = packed.rms_norm(x, scales, 2, 1e-5, weight)
    assert actual.dtype == dtype
    mean_square = np.mean(np.square(x.astype(np.float64)), axis=1, keepdims=True)
    expected = x / np.sqrt(mean_square + 1e-5) * scales[2]
    rtol = 2.0**-8 if dtype == jnp.bfloat16 else 1e-6
    np.testing.assert_allclose(np.asarray(actual, np.float32), expected, rtol=rtol)


def test_normalize_keeps_float32():
    x, scales = _rows(ROWS, 48) * np.float32(30), _rows(3, 48)
    actual = packed.normalize(x, scales, 1, 1e-5, jnp.float32)
    mean_square = np.mean(np.square(x.astype(np.float64)), axis=1, keepdims=True)
    expected = x / np.sqrt(mean_square + 1e-5) * scales[1]
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    with pytest.raises(ValueError, match="rows of a multiple of 16"):
        packed.normalize(x[:, :40], scales[:, :40], 1, 1e-5, jnp.float32)
