"""The arithmetic that decoder layers share: linear, gated linear, RMS norm, embedding.

Owns precision: activations and the residual are float32; a matmul takes both operands
in the weight's dtype and accumulates in float32. Never sees a cache or a config.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels import packed
from pallas_kernels.packed import Packed

Weight = jax.Array | Packed
"""A stack of matrices [L, K, N], as it is or packed for this machine's kernels."""


def linear(
    x: jax.Array, weight: Weight, layer: jax.Array, rows: jax.Array
) -> jax.Array:
    """[T, K] times layer i32[] of the weights [L, K, N] -> f32[T, N].

    Here and below, `rows` i32[] is how many rows count; padding follows them.
    """
    if isinstance(weight, Packed):
        return packed.linear(x, weight, layer, rows)
    return _dot(x, weight[layer], weight_axis=0)


def add_linear(
    y: jax.Array, x: jax.Array, weight: Weight, layer: jax.Array, rows: jax.Array
) -> jax.Array:
    """f32[T, N] plus [T, K] times layer i32[] of [L, K, N] -> f32[T, N]."""
    if isinstance(weight, Packed):
        return packed.add_linear(y, x, weight, layer, rows)
    return y + _dot(x, weight[layer], weight_axis=0)


def gated_linear(
    x: jax.Array,
    weight: Weight,
    layer: jax.Array,
    rows: jax.Array,
    activation: Literal["silu", "gelu_tanh"] = "silu",
) -> jax.Array:
    """The first half of SwiGLU or GeGLU (Shazeer 2020): [T, d] -> [T, F].

    `weight` is [L, d, 2F], gate first.
    """
    if isinstance(weight, Packed):
        return packed.gated_linear(x, weight, layer, rows, activation)
    gate, up = jnp.split(linear(x, weight, layer, rows), 2, axis=-1)
    if activation == "silu":
        return jax.nn.silu(gate) * up
    return jax.nn.gelu(gate, approximate=True) * up


def embed(tokens: jax.Array, embedding: Weight) -> jax.Array:
    """f32[T, d]: rows i32[T] of the embedding [V, d], or of its packed transpose."""
    if isinstance(embedding, Packed):
        return embedding.rows(tokens).astype(jnp.float32)
    return embedding[tokens].astype(jnp.float32)


def project_to_vocab(x: jax.Array, embedding: Weight, rows: jax.Array) -> jax.Array:
    """[R, d] times the transpose of embedding[V, d] -> f32[R, V].

    The head lies as the embedding does, so that tied models keep one copy.
    """
    if isinstance(embedding, Packed):
        return packed.linear(x, embedding, 0, rows)
    return _dot(x, embedding, weight_axis=1)


def _dot(x: jax.Array, weight: jax.Array, weight_axis: int) -> jax.Array:
    # bf16 x bf16 -> f32 reaches the matrix units of CPUs, GPUs and TPUs. Full precision
    # has to be asked for: float32 is rounded to tf32 or bf16 on the latter two.
    exact = weight.dtype == jnp.float32
    rows = x.shape[0]
    # On a CPU one row alone takes a path that is ten times slower than eight rows.
    x = jnp.pad(x, ((0, max(0, 8 - rows)), (0, 0)))
    return jax.lax.dot_general(
        x.astype(weight.dtype),
        weight,
        (((1,), (weight_axis,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    )[:rows]


def rms_norm(
    x: jax.Array,
    scales: jax.Array,
    layer: jax.Array | int,
    epsilon: float,
    weight: Weight,
    rows: jax.Array,
) -> jax.Array:
    """f32[T, d] at unit root mean square, times layer i32[] of scales f32[L, d].

    Returns [T, d] of the dtype in which the linear layer `weight` takes it best.
    """
    if isinstance(weight, Packed):
        return packed.rms_norm(x, scales, layer, epsilon, weight, rows)
    return _rms_norm(x, scales[layer], epsilon)


def normalize(
    x: jax.Array,
    scales: jax.Array,
    layer: jax.Array,
    epsilon: float,
    weight: Weight,
    rows: jax.Array,
) -> jax.Array:
    """The same to f32[T, K], of what the linear layer `weight` gave or of its heads."""
    if isinstance(weight, Packed) and not x.shape[1] % packed.NORM_STEP:
        return packed.normalize(x, scales, layer, epsilon, jnp.float32, rows)
    return _rms_norm(x, scales[layer], epsilon)


def _rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean_square + jnp.float32(epsilon)) * scale[None]
