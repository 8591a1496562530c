"""Weights in the order in which a kernel reads them, packed once.

Owns the packed layout as a pytree and its arithmetic in JAX terms. Where no kernel
takes a weight, `pack` says so and the plain array goes on being used.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import cpu
from pallas_kernels.cpu import PANEL

_STEP_BYTES = 64  # of a row: what a kernel takes in at once


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """A stack of weights [L, K, N]: panels of 32 columns, each with all of K.

    A word of 32 bits is one float32, or two bf16 that are neighbours in K.

    Attributes:
      words: [L, N/32, K, 32] f32 or [L, N/32, K/2, 32, 2] bf16.
      gated: N is 2F, and a panel holds 16 columns of the first half, then the same 16
        of the second.
    """

    words: jax.Array
    gated: bool = dataclasses.field(metadata={"static": True})

    @property
    def dtype(self) -> jnp.dtype:
        """Of the weights."""
        return self.words.dtype

    @property
    def inner(self) -> int:
        """K."""
        return self.words.shape[2] * (self.words.ndim - 3)  # 5 axes: two to a word

    @property
    def columns(self) -> int:
        """N."""
        return self.words.shape[1] * PANEL

    def rows(self, columns: jax.Array) -> jax.Array:
        """The columns i32[T] of the one weight of this stack, as rows [T, K]."""
        if self.gated or self.words.shape[0] != 1:
            raise ValueError(
                f"rows are of one plain weight, not of {self.words.shape[0]} with "
                f"gated={self.gated}"
            )
        picked = self.words[0, columns // PANEL, :, columns % PANEL]
        return picked.reshape(columns.shape[0], -1)


def pack(weights: jax.Array, *, gated: bool = False) -> Packed:
    """Pack a stack [L, K, N] for the CPU's kernels; O(weights), as large as before.

    Raises:
      NotImplementedError: no kernel takes them, and why.
    """
    layers, inner, columns = weights.shape
    reason = cpu.unavailable()
    each = 2 if weights.dtype == jnp.bfloat16 else 1
    if reason is None and weights.dtype not in (jnp.float32, jnp.bfloat16):
        reason = f"weights of {weights.dtype} are neither float32 nor bfloat16"
    step = _STEP_BYTES * each // 4
    if reason is None and (columns % PANEL or inner % step):
        reason = (
            f"{inner} x {columns} weights of {weights.dtype} are no multiple of "
            f"{step} x {PANEL}, the panels they are packed in"
        )
    if reason is not None:
        cpu.refuse("a linear layer", reason)
    halves = 2 if gated else 1
    width = PANEL // halves
    shape = (layers, inner // each, each, halves, columns // halves // width, width)
    order = (0, 4, 1, 3, 5, 2)  # L, panel, step, half, column, element
    out = np.empty([shape[i] for i in order], weights.dtype)
    for layer in range(layers):  # one at a time: the copy on the way is small
        out[layer] = (
            np.asarray(weights[layer])
            .reshape(shape[1:])
            .transpose([i - 1 for i in order[1:]])
        )
    words = (layers, columns // PANEL, inner // each, PANEL, each)
    return Packed(jnp.asarray(out.reshape(words if each == 2 else words[:4])), gated)


def linear(x: jax.Array, weight: Packed, layer: jax.Array | int) -> jax.Array:
    """f32[T, N] = x[T, K] W; x is rounded to the weights' dtype."""
    return _multiply(x, weight, layer, "LINEAR")


def add_linear(
    y: jax.Array, x: jax.Array, weight: Packed, layer: jax.Array | int
) -> jax.Array:
    """f32[T, N] = y + x[T, K] W, in place of y where XLA can."""
    return _multiply(x, weight, layer, "ADD", y)


def gated_linear(x: jax.Array, weight: Packed, layer: jax.Array | int) -> jax.Array:
    """[T, F] = silu(x G) * (x U) of a gated weight, rounded to its dtype."""
    return _multiply(x, weight, layer, "GATED")


def rms_norm(
    x: jax.Array,  # f32[T, K]
    scales: jax.Array,  # f32[L, K]
    layer: jax.Array | int,
    epsilon: float,
    weight: Packed,
) -> jax.Array:  # [T, K] of the weight's dtype
    """RMS norm of the rows, times scales[layer], for a linear layer to take."""
    if x.ndim != 2 or x.shape[1:] != scales.shape[1:] or x.shape[1] != weight.inner:
        raise ValueError(
            f"x of shape {x.shape} and scales of shape {scales.shape} must be [T, K] "
            f"and [L, K] with K={weight.inner} of the weight"
        )
    x, scales = (array.astype(jnp.float32) for array in (x, scales))
    from pallas_kernels.cpu import calls  # only now: it needs numba

    return calls.normalize(x, scales, layer, epsilon, weight.dtype)


def _multiply(
    x: jax.Array, weight: Packed, layer: Any, mode: str, *more: jax.Array
) -> jax.Array:
    if weight.gated != (mode == "GATED"):
        raise ValueError(f"a weight packed with gated={weight.gated} is no {mode} one")
    if x.ndim != 2 or x.shape[1] != weight.inner:
        raise ValueError(f"x of shape {x.shape} must be [T, K] with K={weight.inner}")
    for y in more:
        if y.shape != (x.shape[0], weight.columns) or y.dtype != jnp.float32:
            raise ValueError(
                f"y of {y.dtype}{list(y.shape)} must be "
                f"float32[{x.shape[0]}, {weight.columns}]"
            )
    from pallas_kernels.cpu import calls  # only now: it needs numba

    return calls.multiply(x, weight.words, layer, getattr(calls.linear, mode), *more)
