"""A small batch on the CPU's kernels, and a program that computes it in a process.

python -m tests.kernels.small_batch OUT.npz linear attention
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import cpu, packed, paged_attention
from tests.kernels import emulated_tiles
from tests.kernels.batches import Batch, Shape, make_batch

DTYPES = ("float32", "bfloat16")
SCALE = 0.1


def attention_batch(dtype: str) -> Batch:
    """Decode rows that share two strides, one that does not, and two chunks."""
    shape = Shape(64, 8, 12, 16, 2, 3, 80, dtype, dtype)
    return make_batch(
        shape,
        [1, 1, 1, 1, 33, 9],
        [150, 129, 70, 190, 100, 9],
        shared=[([0, 1, 3], slice(8))],
    )


def linear_operands(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows [T, K] and weights [K, N]."""
    rng = np.random.default_rng(0)
    x, weight = (rng.standard_normal(s, np.float32) for s in ((30, 96), (96, 96)))
    return x.astype(jnp.dtype(dtype)), weight.astype(jnp.dtype(dtype))


def attention(dtype: str) -> jax.Array:
    return jax.jit(
        lambda *batch: paged_attention(*batch, scale=SCALE, implementation="cpu")
    )(*attention_batch(dtype))


def linear(dtype: str) -> jax.Array:
    x, weight = linear_operands(dtype)
    weight = packed.pack(jnp.asarray(weight[None]))
    return jax.jit(lambda x, weight: packed.linear(x, weight, 0))(x, weight)


def main(path: str, *names: str) -> None:
    """Write what each named function gives for each dtype, as float32."""
    emulated_tiles.use_if_asked()
    made = {"attention": attention, "linear": linear}
    out = {
        f"{name} {dtype}": np.asarray(made[name](dtype), np.float32)
        for name in names
        for dtype in DTYPES
    }
    np.savez(path, **out, sets=sorted(cpu.instruction_sets()))


if __name__ == "__main__":
    main(*sys.argv[1:])
