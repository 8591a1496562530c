"""Attention of whole sequences without a cache, the plain way, to be differentiated.

Owns the arithmetic, which is that of the paged kernels. Never sees a page or a weight.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.rotary import rotate


def dense_attention(
    qkv: jax.Array,  # f32[B * T, Hq + 2 Hkv, D] queries, then keys, then values
    cos: jax.Array,  # f32[B * T, D / 2]
    sin: jax.Array,  # f32[B * T, D / 2]
    *,
    rows: int,
    kv_heads: int,
    dtype: jnp.dtype,
    scale: float,
    window: int | jax.Array | None,
    soft_cap: float | None,
) -> jax.Array:  # [B * T, Hq, D] of `dtype`
    """Rotate queries and keys, and attend causally in B sequences of T tokens.

    Args:
      rows: B. kv_heads: Hkv.
      dtype: what a cache would round queries, keys and values to.
      scale, window, soft_cap: as in `pallas_kernels.paged_attention`.
    """
    total, heads, size = qkv.shape
    query_heads, length = heads - 2 * kv_heads, total // rows
    q, k, v = jnp.split(qkv, [query_heads, query_heads + kv_heads], axis=1)
    q, k, v = (
        x.astype(dtype).reshape(rows, length, kv_heads, -1, size)
        for x in (rotate(q, cos, sin), rotate(k, cos, sin), v)
    )
    exact = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    # h: KV heads; g: the query heads that share one.
    logits = jnp.einsum(
        "bthgd,bshd->bhgts",
        q,
        k[:, :, :, 0],
        precision=exact,
        preferred_element_type=jnp.float32,
    ) * jnp.float32(scale)
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    behind = jnp.arange(length)[:, None] - jnp.arange(length)[None, :]
    seen = behind >= 0 if window is None else (behind >= 0) & (behind < window)
    weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=-1)
    out = jnp.einsum(
        "bhgts,bshd->bthgd",
        weights.astype(dtype),
        v[:, :, :, 0],
        precision=exact,
        preferred_element_type=jnp.float32,
    )
    return out.astype(dtype).reshape(total, query_heads, size)
