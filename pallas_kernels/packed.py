"""Weights in the order in which a kernel reads them, packed once.

Owns the packed layout as a pytree and its arithmetic in JAX terms. Where no kernel
takes a weight, `pack` says so and the plain array goes on being used.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import cpu
from pallas_kernels.cpu import PANEL

_STEP_BYTES = 64  # of a row: what a kernel takes in at once
NORM_STEP = 16
"""Elements of a row that the norm takes in at once."""
_ALIGNMENT = 64  # bytes, of what XLA allocates


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


def skip_padding(params: Any) -> bool:
    """Whether a model with these parameters computes no padding, which is then free."""
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Packed))
    return any(isinstance(leaf, Packed) for leaf in leaves)


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
    out = _aligned([shape[i] for i in order], weights.dtype)
    out[:] = np.asarray(weights).reshape(shape).transpose(order)
    words = (layers, columns // PANEL, inner // each, PANEL, each)
    out = out.reshape(words if each == 2 else words[:4])
    return Packed(jax.device_put(out, may_alias=True), gated)


def _aligned(shape: Sequence[int], dtype: jnp.dtype) -> np.ndarray:
    """Memory that JAX takes as it is, for it begins where JAX's own would."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def linear(
    x: jax.Array,
    weight: Packed,
    layer: jax.Array | int,
    rows: jax.Array | int | None = None,
) -> jax.Array:
    """f32[T, N] = x[T, K] W; x is rounded to the weights' dtype.

    Here and below, `rows` i32[] is how many leading rows count, None for all; what the
    others become is undefined.
    """
    return _multiply(x, weight, layer, rows, "LINEAR")


def add_linear(
    y: jax.Array,
    x: jax.Array,
    weight: Packed,
    layer: jax.Array | int,
    rows: jax.Array | int | None = None,
) -> jax.Array:
    """f32[T, N] = y + x[T, K] W, in place of y where XLA can; past `rows` it is y."""
    return _multiply(x, weight, layer, rows, "ADD", y)


def gated_linear(
    x: jax.Array,
    weight: Packed,
    layer: jax.Array | int,
    rows: jax.Array | int | None = None,
    activation: Literal["silu", "gelu_tanh"] = "silu",
) -> jax.Array:
    """[T, F] = silu(x G) * (x U) of a gated weight, rounded to its dtype; or with GELU
    in its tanh approximation (Hendrycks and Gimpel, 2016)."""
    mode = "GATED" if activation == "silu" else "GATED_GELU"
    return _multiply(x, weight, layer, rows, mode)


def rms_norm(
    x: jax.Array,  # f32[T, K]
    scales: jax.Array,  # f32[L, K]
    layer: jax.Array | int,
    epsilon: float,
    weight: Packed,
    rows: jax.Array | int | None = None,
) -> jax.Array:  # [T, K] of the weight's dtype
    """RMS norm of the rows, times scales[layer], for a linear layer to take."""
    if x.ndim != 2 or x.shape[1:] != scales.shape[1:] or x.shape[1] != weight.inner:
        raise ValueError(
            f"x of shape {x.shape} and scales of shape {scales.shape} must be [T, K] "
            f"and [L, K] with K={weight.inner} of the weight"
        )
    return normalize(x, scales, layer, epsilon, weight.dtype, rows)


def normalize(
    x: jax.Array,  # f32[T, K], K a multiple of NORM_STEP
    scales: jax.Array,  # f32[L, K]
    layer: jax.Array | int,
    epsilon: float,
    dtype: jax.typing.DTypeLike,
    rows: jax.Array | int | None = None,
) -> jax.Array:  # [T, K] of `dtype`
    """RMS norm of the rows, times scales[layer]."""
    if x.shape[1] % NORM_STEP:
        raise ValueError(
            f"x of shape {x.shape} must have rows of a multiple of {NORM_STEP}"
        )
    x, scales = (array.astype(jnp.float32) for array in (x, scales))
    from pallas_kernels.cpu import calls  # only now: it needs numba

    rows = x.shape[0] if rows is None else rows
    return calls.normalize(x, scales, layer, epsilon, rows, dtype)


def _multiply(
    x: jax.Array, weight: Packed, layer: Any, rows: Any, mode: str, *more: jax.Array
) -> jax.Array:
    if weight.gated != mode.startswith("GATED"):
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

    rows = x.shape[0] if rows is None else rows
    mode_number = getattr(calls.linear, mode)
    return calls.multiply(x, weight.words, layer, rows, mode_number, *more)
