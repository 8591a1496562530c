"""Weights of a decoder that has not learned anything yet.

Owns their distribution. Never sees a checkpoint.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.models.base import Params
from jaxserve.models.decoder_config import DecoderConfig


def random_params(config: DecoderConfig, key: jax.Array) -> Params:
    """Parameters in the plain layout (see weights.py), normally distributed.

    Matrices keep the scale of what they are given, and those that add to the residual
    are smaller by the square root of how many do (Radford et al. 2019). Embeddings have
    a deviation of 0.02, so that the first logits are nearly equal. Norms are 1, biases
    0.
    """
    c = config
    d, f, queries = c.hidden_size, c.intermediate_size, c.num_heads * c.head_dim
    width = queries + 2 * c.num_kv_heads * c.head_dim
    keys = iter(jax.random.split(key, 6))

    def normal(shape: tuple[int, ...], deviation: float) -> jax.Array:
        drawn = jax.random.normal(next(keys), shape, jnp.float32)
        return (drawn * deviation).astype(c.dtype)

    def stack(inner: int, columns: int, scale: float = 1.0) -> jax.Array:
        return normal((c.num_layers, inner, columns), scale * inner**-0.5)

    residual = (2 * c.num_layers) ** -0.5
    layers = {
        "qkv": stack(d, width),
        "output": stack(queries, d, residual),
        "gate_up": stack(d, 2 * f),
        "down": stack(f, d, residual),
    }
    norms = {"attention_norm": d, "mlp_norm": d}
    if c.qk_norm:
        norms |= {"q_norm": c.head_dim, "k_norm": c.head_dim}
    if c.post_norms:
        norms |= {"output_norm": d, "down_norm": d}
    for name, size in norms.items():
        layers[name] = jnp.ones((c.num_layers, size), jnp.float32)
    if c.qkv_bias:
        layers["qkv_bias"] = jnp.zeros((c.num_layers, width), jnp.float32)
    params = {"layers": layers, "norm": jnp.ones(d, jnp.float32)}
    params["embed"] = normal((c.vocab_size, d), 0.02)
    if not c.tied:
        params["head"] = normal((c.vocab_size, d), 0.02)
    return params
