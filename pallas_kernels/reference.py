"""Attention over paged KV the plain way: the oracle that implementations must match.

One dense softmax per row over its gathered blocks, in float32 at HIGHEST precision. Its
memory grows with T x M x B: for tests only.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def paged_attention(
    q: jax.Array,  # [T, Hq, D]
    pages: jax.Array,  # [NP, B, Hkv, 2, D]
    table: jax.Array,  # i32[R, M]
    kv_lens: jax.Array,  # i32[R]
    cu_q_lens: jax.Array,  # i32[R + 1]
    num_decode: jax.Array
    | int,  # i32[]; not needed: a decode row is a chunk of one token
    *,
    scale: float,
    window: int | jax.Array | None = None,
    soft_cap: float | None = None,
) -> jax.Array:  # [T, Hq, D]
    """See `pallas_kernels.api.paged_attention`."""
    del num_decode
    num_tokens, query_heads, head_size = q.shape
    kv_heads = pages.shape[2]
    token = jnp.arange(num_tokens)

    def add_row(out, row):  # out f32[T, Hq, D], zero where no row has written
        blocks, kv_len, start, stop = row
        kv = pages[blocks].reshape(-1, kv_heads, 2, head_size).astype(jnp.float32)
        kv_pos = jnp.arange(kv.shape[0])
        kv = jnp.where((kv_pos < kv_len)[:, None, None, None], kv, jnp.float32(0))
        kv = jnp.repeat(kv, query_heads // kv_heads, axis=1)  # [M * B, Hq, 2, D]
        logits = jnp.einsum(
            "thd,shd->ths",
            q.astype(jnp.float32),
            kv[:, :, 0],
            precision=lax.Precision.HIGHEST,
        ) * jnp.float32(scale)
        if soft_cap is not None:
            logits = soft_cap * jnp.tanh(logits / soft_cap)
        q_pos = kv_len - stop + token  # the row's last token is at kv_len - 1
        own = (token >= start) & (token < stop) & (kv_len > 0)
        seen = kv_pos[None, :] <= q_pos[:, None]
        if window is not None:
            seen &= kv_pos[None, :] > q_pos[:, None] - window
        weights = jax.nn.softmax(
            jnp.where(seen[:, None, :], logits, -jnp.inf),
            axis=-1,
            where=own[:, None, None],
        )
        row_out = jnp.einsum(
            "ths,shd->thd", weights, kv[:, :, 1], precision=lax.Precision.HIGHEST
        )
        return jnp.where(own[:, None, None], row_out, out), None

    rows = (table, kv_lens, cu_q_lens[:-1], cu_q_lens[1:])
    out, _ = lax.scan(add_row, jnp.zeros(q.shape, jnp.float32), rows)
    return out.astype(q.dtype)
