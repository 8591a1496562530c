"""Attention over paged KV in plain XLA; the implementation that runs everywhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

_KV_TOKENS = 128
_MASKED = jnp.float32(-1e30)


def paged_attention(
    q: jax.Array,  # [T, Hq, D]
    pages: jax.Array,  # [NP, B, Hkv, 2, D]
    table: jax.Array,  # i32[R, M]
    kv_lens: jax.Array,  # i32[R]
    cu_q_lens: jax.Array,  # i32[R + 1]
    num_decode: jax.Array,  # i32[]
    *,
    scale: float,
) -> jax.Array:  # [T, Hq, D]
    """See `pallas_kernels.api.paged_attention`."""
    num_tokens, query_heads, head_size = q.shape
    _, block, kv_heads, _, _ = pages.shape
    groups = query_heads // kv_heads
    columns = max(1, _KV_TOKENS // block)
    kv_tokens = columns * block
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % columns)))

    def attend(queries, row, q_pos):
        """queries f32[n, Hq, D] of one row at positions q_pos i32[n]."""
        n = queries.shape[0]
        x = queries.reshape(n, kv_heads, groups, head_size).transpose(1, 2, 0, 3)
        x = (x * jnp.float32(scale)).reshape(kv_heads, groups * n, head_size)
        pos = jnp.tile(q_pos, groups)
        limit = jnp.minimum(kv_lens[row], q_pos[-1] + 1)

        def step(i, carry):
            acc, top, total = carry
            ids = lax.dynamic_slice(table, (row, i * columns), (1, columns))[0]
            kv = pages[ids].reshape(kv_tokens, kv_heads, 2, head_size)
            kv_pos = i * kv_tokens + jnp.arange(kv_tokens)
            kv = jnp.where((kv_pos < limit)[:, None, None, None], kv, 0)
            kv = kv.astype(jnp.float32)
            s = jnp.einsum("hqd,shd->hqs", x, kv[:, :, 0])
            s = jnp.where((kv_pos[None, :] <= pos[:, None])[None], s, _MASKED)
            new = jnp.maximum(top, s.max(-1))
            p = jnp.exp(s - new[..., None])
            decay = jnp.exp(top - new)
            acc = acc * decay[..., None] + jnp.einsum("hqs,shd->hqd", p, kv[:, :, 1])
            return acc, new, total * decay + p.sum(-1)

        zero = jnp.zeros(x.shape[:2], jnp.float32)
        acc, _, total = lax.fori_loop(
            0,
            (limit + kv_tokens - 1) // kv_tokens,
            step,
            (jnp.zeros(x.shape, jnp.float32), zero + _MASKED, zero),
        )
        out = jnp.where(total > 0, 1 / total, 0)[..., None] * acc
        out = out.reshape(kv_heads, groups, n, head_size).transpose(2, 0, 1, 3)
        return out.reshape(n, query_heads, head_size)

    size = min(num_tokens, 64)
    padded = jnp.pad(q.astype(jnp.float32), ((0, size), (0, 0), (0, 0)))
    out = jnp.zeros_like(padded)

    def decode(row, out):
        x = lax.dynamic_slice(padded, (row, 0, 0), (1, query_heads, head_size))
        o = attend(x, row, kv_lens[row][None] - 1)
        return lax.dynamic_update_slice(out, o, (row, 0, 0))

    out = lax.fori_loop(0, num_decode, decode, out)
    q_lens = jnp.diff(cu_q_lens)
    is_chunk = jnp.arange(table.shape[0]) >= num_decode
    blocks = jnp.cumsum(jnp.where(is_chunk, (q_lens + size - 1) // size, 0))

    def chunk(i, out):
        row = jnp.searchsorted(blocks, i, side="right")
        nth = blocks[row] - i  # blocks of the row that are left, this one included
        done = ((q_lens[row] + size - 1) // size - nth) * size
        start = cu_q_lens[row] + done
        x = lax.dynamic_slice(padded, (start, 0, 0), (size, query_heads, head_size))
        q_pos = kv_lens[row] - q_lens[row] + done + jnp.arange(size)
        o = attend(x, row, q_pos)
        own = (jnp.arange(size) < q_lens[row] - done)[:, None, None]
        old = lax.dynamic_slice(out, (start, 0, 0), o.shape)
        return lax.dynamic_update_slice(out, jnp.where(own, o, old), (start, 0, 0))

    out = lax.fori_loop(0, blocks[-1], chunk, out)
    return out[:num_tokens].astype(q.dtype)
