"""Rotary position embedding: the frequencies a checkpoint means, and their angles.

Owns the frequencies of RoPE (Su et al. 2021) and of its scalings for long contexts.
Never sees a query, a key or a cache: a decoder holds the finished tables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

KINDS = ("default", "linear", "llama3", "yarn", "longrope")
_ALIASES = {"su": "longrope"}  # what the first Phi-3 files call it


class Rope(NamedTuple):
    """How positions turn a head, pair by pair; pair i is (x[i], x[i + D/2]).

    Attributes:
      frequencies: D/2 radians a position, any context scaling applied; 0 where a pair
        does not turn.
      factors: D/2 numbers that cos and sin are multiplied by; empty: all are 1.
    """

    frequencies: tuple[float, ...]
    factors: tuple[float, ...] = ()


def no_rope(head_dim: int) -> Rope:
    """For layers that know no positions (NoPE: Kazemnejad et al. 2023)."""
    return Rope((0.0,) * (head_dim // 2))


def read_rope(
    head_dim: int,
    parameters: Mapping[str, Any],
    *,
    rotary_dim: int | None = None,
    longest: int | None = None,
) -> Rope:
    """The rope that `rope_parameters` of a config mean.

    Args:
      head_dim: D.
      parameters: `rope_theta`, `rope_type` (one of `KINDS`) and what that one takes:
        "linear": `factor`, which divides all frequencies (Chen et al. 2023).
        "llama3": `factor`, `low_freq_factor`, `high_freq_factor` and
        `original_max_position_embeddings`.
        "yarn" (Peng et al. 2023): `factor`, `original_max_position_embeddings`, and
        perhaps `attention_factor`, `beta_fast`, `beta_slow`, `truncate`.
        "longrope" (Ding et al. 2024): `short_factor`, `long_factor`, `factor`,
        `original_max_position_embeddings` and perhaps `attention_factor`.
      rotary_dim: leading numbers of a head that turn; None: all. They come out as the
        first rotary_dim / 2 pairs.
      longest: most positions a sequence will have. "longrope" has one table for
        sequences within the original context and one for longer ones, and cached keys
        cannot change from one to the other; so one table serves all: the short one if
        no sequence can outgrow the original context. None: the long one.

    Raises ValueError naming a type that is not known or a parameter that is missing.
    """
    kind = parameters.get("rope_type") or "default"
    kind = _ALIASES.get(kind, kind)
    if kind not in KINDS:
        known = ", ".join(map(repr, KINDS))
        raise ValueError(f"rope_type={kind!r} is not supported; known: {known}")
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    exponent = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    freq = 1.0 / np.float32(parameters["rope_theta"]) ** exponent
    factor = 1.0
    if kind == "linear":
        freq = freq / np.float32(_need(parameters, kind, "factor"))
    elif kind == "llama3":
        freq = freq / llama3_factors(freq, parameters)
    elif kind == "yarn":
        freq, factor = _yarn(freq, parameters)
    elif kind == "longrope":
        freq, factor = _longrope(freq, parameters, longest)
    idle = (head_dim - rotary_dim) // 2
    frequencies = (*freq.astype(np.float32).tolist(), *[0.0] * idle)
    turning = () if factor == 1.0 else (float(factor),) * len(freq)
    return Rope(frequencies, (*turning, *[1.0] * idle) if turning else ())


def _need(parameters: Mapping[str, Any], kind: str, name: str) -> Any:
    if parameters.get(name) is None:
        raise ValueError(f"rope_type={kind!r} needs {name}, and the config lacks it")
    return parameters[name]


def llama3_factors(freq: np.ndarray, parameters: Mapping[str, Any]) -> np.ndarray:
    """What Llama 3.1 divides frequencies by: long waves by `factor`, short ones by 1.

    Between the two limits the *frequency* is interpolated, not the divisor.
    """
    factor, low, high, context = (
        _need(parameters, "llama3", name)
        for name in (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        )
    )
    turns = context * freq / (2 * math.pi)  # rotations over the original context
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)


def _yarn(freq: np.ndarray, parameters: Mapping[str, Any]) -> tuple[np.ndarray, float]:
    """Pairs that turn often keep their frequency, slow ones are stretched by `factor`,
    with a ramp over the pairs between; and the attention's temperature."""
    factor = _need(parameters, "yarn", "factor")
    context = _need(parameters, "yarn", "original_max_position_embeddings")
    theta, dim = parameters["rope_theta"], 2 * len(freq)

    def pair(turns: float) -> float:
        """Which pair turns so often over the original context."""
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = pair(parameters.get("beta_fast") or 32)
    high = pair(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    ramp = np.clip((np.arange(len(freq), dtype=np.float32) - low) / (high - low), 0, 1)
    temperature = parameters.get("attention_factor")
    if temperature is None:
        temperature = _mscale(factor, 1.0)
        if parameters.get("mscale") and parameters.get("mscale_all_dim"):
            one, other = parameters["mscale"], parameters["mscale_all_dim"]
            temperature = _mscale(factor, one) / _mscale(factor, other)
    return freq / factor * ramp + freq * (1 - ramp), temperature


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _longrope(
    freq: np.ndarray, parameters: Mapping[str, Any], longest: int | None
) -> tuple[np.ndarray, float]:
    """Each pair has a divisor of its own, found by search."""
    context = _need(parameters, "longrope", "original_max_position_embeddings")
    short = longest is not None and longest <= context
    name = "short_factor" if short else "long_factor"
    divisors = np.asarray(_need(parameters, "longrope", name), np.float32)
    if divisors.shape != freq.shape:
        raise ValueError(
            f"{name} of rope_type='longrope' has {divisors.size} entries, and the "
            f"{2 * freq.size} rotary dimensions need {freq.size}: one a pair"
        )
    temperature = parameters.get("attention_factor")
    if temperature is None:
        factor = _need(parameters, "longrope", "factor")
        temperature = (
            math.sqrt(1 + math.log(factor) / math.log(context)) if factor > 1 else 1.0
        )
    return freq / divisors, temperature


def angles(positions: jax.Array, rope: Rope) -> tuple[jax.Array, jax.Array]:
    """(cos, sin), both f32[T, D/2], of i32[T] positions."""
    freq = jnp.asarray(rope.frequencies, jnp.float32)
    theta = positions.astype(jnp.float32)[:, None] * freq[None, :]
    cos, sin = jnp.cos(theta), jnp.sin(theta)
    if not rope.factors:
        return cos, sin
    factors = jnp.asarray(rope.factors, jnp.float32)[None, :]
    return cos * factors, sin * factors
