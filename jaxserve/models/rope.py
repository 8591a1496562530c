"""Rotary position embedding: the frequencies a checkpoint means, and their angles.

Owns the frequencies of RoPE (Su et al. 2021) and the Llama 3 scaling. Never sees a
query, a key or a cache: a decoder holds the finished table of frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def inverse_frequencies(
    head_dim: int, parameters: Mapping[str, Any]
) -> tuple[float, ...]:
    """Radians a position for each of the D/2 pairs, from `rope_parameters` of a config.

    Args:
      head_dim: D.
      parameters: `rope_theta`, `rope_type` ("default" or "llama3"), and for "llama3"
        `factor`, `low_freq_factor`, `high_freq_factor` and
        `original_max_position_embeddings`.

    Returns: D/2 floats of float32 precision, hashable so that a config can hold them.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    freq = 1.0 / np.float32(parameters["rope_theta"]) ** exponent
    kind = parameters.get("rope_type") or "default"
    if kind == "llama3":
        freq = freq / llama3_factors(freq, parameters)
    elif kind != "default":
        raise ValueError(
            f"rope_type={kind!r} is not supported; known: 'default', 'llama3'"
        )
    return tuple(freq.astype(np.float32).tolist())


def llama3_factors(freq: np.ndarray, parameters: Mapping[str, Any]) -> np.ndarray:
    """What Llama 3.1 divides frequencies by: long waves by `factor`, short ones by 1.

    Between the two limits the *frequency* is interpolated, not the divisor.
    """
    factor = parameters["factor"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    context = parameters["original_max_position_embeddings"]
    turns = context * freq / (2 * math.pi)  # rotations over the original context
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)


def angles(
    positions: jax.Array, frequencies: tuple[float, ...]
) -> tuple[jax.Array, jax.Array]:
    """(cos, sin), both f32[T, D/2], of i32[T] positions."""
    freq = jnp.asarray(frequencies, jnp.float32)
    theta = positions.astype(jnp.float32)[:, None] * freq[None, :]
    return jnp.cos(theta), jnp.sin(theta)
