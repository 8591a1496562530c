"""Rotary position embedding of queries and keys (Su et al., 2021)."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn f32[T, H, D] by the angles f32[T, D/2]; pair i is (x[i], x[i + D/2])."""
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )
