"""Attention over paged KV in plain XLA: the implementation that runs everywhere.

Online softmax over blocks of KV rows, read straight from the pool (Milakov and
Gimelshein, 2018; FlashAttention: Dao et al., 2022). Trip counts are data, so that the
program depends on the shapes alone, and temporary memory on T and R, never on the pool.

Every row walks its own KV in order, and a step past its end leaves it as it is, bit for
bit, so that its values do not depend on the other rows of the batch. One exception:
blocks that several decode rows share are read once for all of them, and in float32 that
may round the last bit another way.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.xla.chunks import attend_chunks
from pallas_kernels.xla.decode import attend_decode


def paged_attention(
    q: jax.Array,  # [T, Hq, D]
    pages: jax.Array,  # [NP, B, Hkv, 2, D]
    table: jax.Array,  # i32[R, M]
    kv_lens: jax.Array,  # i32[R]
    cu_q_lens: jax.Array,  # i32[R + 1]
    num_decode: jax.Array | int,  # i32[]
    *,
    scale: float,
    window: int | jax.Array | None = None,
    soft_cap: float | None = None,
) -> jax.Array:  # [T, Hq, D]
    """See `pallas_kernels.api.paged_attention`."""
    num_tokens, query_heads, head_size = q.shape
    num_pages, block, kv_heads, _, _ = pages.shape
    rows = table.shape[0]
    # Query heads of one KV head side by side; K and V of one KV head as one row.
    queries = (q.astype(jnp.float32) * jnp.float32(scale)).astype(pages.dtype)
    queries = queries.reshape(num_tokens, kv_heads, -1, head_size)
    pool = pages.reshape(num_pages, block, kv_heads, 2 * head_size)
    is_decode = jnp.arange(rows) < num_decode

    # Token r of a decode row is row r; what is no decode row comes out zero.
    decoded = attend_decode(
        _resize(queries, rows),
        pool,
        table,
        jnp.where(is_decode, kv_lens, 0),
        window,
        soft_cap,
    )
    out = _resize(decoded, num_tokens)
    if not (isinstance(num_decode, int) and num_decode == rows):
        q_lens = jnp.where(is_decode, 0, jnp.diff(cu_q_lens))
        out = attend_chunks(
            out,
            queries,
            pool,
            table,
            kv_lens,
            cu_q_lens[:-1],
            q_lens,
            window,
            soft_cap,
        )
    return out.reshape(num_tokens, query_heads, head_size).astype(q.dtype)


def _resize(x: jax.Array, size: int) -> jax.Array:
    """x with its first axis cut, or filled up with zeros, to `size`."""
    return jnp.pad(x[:size], ((0, max(0, size - len(x))), *[(0, 0)] * (x.ndim - 1)))
