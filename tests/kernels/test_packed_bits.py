"""The bits that layers on packed weights promise: each row is computed by itself."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import packed
from tests.kernels.marks import needs_cpu_kernels

MOST = 130  # rows: more than one item of 120, and tiles of 1 to 12
INNER, COLUMNS = 96, 96
pytestmark = needs_cpu_kernels
DTYPES = [jnp.float32, jnp.bfloat16]


def _random(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


@functools.cache
def _weights(dtype):
    weight = jnp.asarray(_random(2, INNER, COLUMNS), dtype)
    return packed.pack(weight), packed.pack(weight, gated=True)


@jax.jit
def _jitted(x, y, plain, gated):
    return (
        packed.linear(x, plain, 1),
        packed.add_linear(y, x, plain, 1),
        packed.gated_linear(x, gated, 1).astype(jnp.float32),
        packed.gated_linear(x, gated, 1, None, "gelu_tanh").astype(jnp.float32),
        packed.rms_norm(x, jnp.ones((1, INNER)), 0, 1e-5, plain).astype(jnp.float32),
        packed.normalize(x, jnp.ones((1, INNER)), 0, 1e-5, jnp.float32),
    )


def _layers(x, y, dtype):
    """What each layer makes of rows x[T, K] and y[T, N], in NumPy."""
    return [np.asarray(out) for out in _jitted(x, y, *_weights(dtype))]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_may_stand_anywhere_among_any_number_of_rows(dtype):
    x, y = _random(MOST, INNER), _random(MOST, COLUMNS)
    expected = _layers(x, y, dtype)
    for count in range(1, MOST):
        start = count * 37 % (MOST + 1 - count)
        rows = slice(start, start + count)
        for actual, whole in zip(
            _layers(x[rows], y[rows], dtype), expected, strict=True
        ):
            np.testing.assert_array_equal(actual, whole[rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row(value, dtype):
    x, y = _random(31, INNER), _random(31, COLUMNS)
    expected = _layers(x, y, dtype)
    x[13, 5] = value
    others = np.arange(31) != 13
    for actual, clean in zip(_layers(x, y, dtype), expected, strict=True):
        np.testing.assert_array_equal(actual[others], clean[others])


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_is_passed_on(dtype):
    x, y = _random(3, INNER), _random(3, COLUMNS)
    x[1, INNER - 1] = np.nan
    for out in _layers(x, y, dtype):
        assert np.isnan(out[1]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_of_the_residual_stays_where_it_is(dtype):
    x, y = _random(3, INNER), _random(3, COLUMNS)
    y[1, 40] = np.nan
    _, added, *_ = _layers(x, y, dtype)
    np.testing.assert_array_equal(np.isnan(added), np.isnan(y))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("gate", "silu"),
    [
        (1e4, 1e4),
        (100.0, 100.0),
        (1.0, 0.7310585786300049),
        (-1.0, -0.2689414213699951),
        (-20.0, -4.122307236380407e-8),
        (-100.0, 0.0),
        (-1e4, 0.0),
        (-1e30, 0.0),
        (np.inf, np.inf),
        (-3e38, 0.0),
        (-np.inf, 0.0),
    ],
)
def test_a_gate_of_any_size_has_the_value_of_silu(gate, silu, dtype):
    """Times 2 of the other half; tiny values may be rounded to 0 or to about 1e-8."""
    weight = np.zeros((1, 32, 32), np.float32)
    weight[0, 0, :16] = weight[0, 1, 16:] = 1
    weight[0, 2, :16] = 1e38  # to make an infinite gate of finite inputs
    x = np.zeros((1, 32), np.float32)
    x[0, :2] = gate, 2
    if np.isinf(gate):
        x[0, 0], x[0, 2] = 0, np.sign(gate) * 1e38
    weight = packed.pack(jnp.asarray(weight, dtype), gated=True)
    actual = np.asarray(packed.gated_linear(x, weight, 0), np.float64)
    rtol = 2.0**-7 if dtype == jnp.bfloat16 else 1e-6
    np.testing.assert_allclose(actual, 2 * silu, rtol=rtol, atol=5e-8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("gate", "gelu"),
    [
        (1e4, 1e4),
        (1.0, 0.8411919906082768),
        (-1.0, -0.15880800939172324),
        (-3.0, -0.0036373920817729943),
        (-1e4, 0.0),
        (-1e30, 0.0),
        (3e38, 3e38),
        (-3e38, 0.0),
    ],
)
def test_a_gate_of_any_size_has_the_value_of_gelu(gate, gelu, dtype):
    """In its tanh approximation, times 1/2 of the other half."""
    weight = np.zeros((1, 32, 32), np.float32)
    weight[0, 0, :16] = weight[0, 1, 16:] = 1
    x = np.zeros((1, 32), np.float32)
    x[0, :2] = gate, 0.5
    weight = packed.pack(jnp.asarray(weight, dtype), gated=True)
    actual = packed.gated_linear(x, weight, 0, activation="gelu_tanh")
    rtol = 2.0**-6 if dtype == jnp.bfloat16 else 1e-6
    actual = np.asarray(actual, np.float64)
    np.testing.assert_allclose(actual, gelu / 2, rtol=rtol, atol=5e-8)
