"""The rules for the arguments of attention: shapes and dtypes, checked when traced."""

from __future__ import annotations

import jax
import jax.numpy as jnp

EVERYTHING = 2**30
"""A window that no context fills."""

_DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))


def check_rotary(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    pages: jax.Array,
    page_ids: jax.Array,
    offsets: jax.Array,
) -> None:
    """Refuse what `rotary_attention` takes beside the arguments of attention."""
    if qkv.ndim != 3 or pages.ndim != 5 or qkv.shape[1] % pages.shape[2]:
        raise ValueError(
            f"qkv of shape {qkv.shape} must be [T, Hq + 2 Hkv, D], with Hq a multiple "
            f"of Hkv in pages of shape {pages.shape}, [NP, B, Hkv, 2, D]"
        )
    tokens, heads, head_size = qkv.shape
    if heads < 3 * pages.shape[2]:
        raise ValueError(
            f"qkv of shape {qkv.shape} must hold Hq + 2 Hkv heads, at least 3 for each "
            f"of the {pages.shape[2]} KV heads"
        )
    for name, array, shape in (
        ("cos", cos, (tokens, head_size // 2)),
        ("sin", sin, (tokens, head_size // 2)),
        ("page_ids", page_ids, (tokens,)),
        ("offsets", offsets, (tokens,)),
    ):
        if array.shape != shape:
            raise ValueError(f"{name} of shape {array.shape} must be {shape}")
    for name, array in (("qkv", qkv), ("cos", cos), ("sin", sin)):
        if array.dtype != jnp.float32:
            raise ValueError(f"{name} of {array.dtype} must be float32")


def check(
    q: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_decode: jax.Array | int,
    window: int | jax.Array | None,
    soft_cap: float | None,
) -> None:
    """Refuse arguments of `paged_attention` that break its rules."""
    if isinstance(window, int) and window < 1:
        raise ValueError(f"{window=} must be at least 1: a token sees itself; or None")
    if isinstance(window, jax.Array) and (window.shape or window.dtype != jnp.int32):
        raise ValueError(f"window of {window.dtype}{list(window.shape)} must be i32[]")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"{soft_cap=} must be above 0, or None for no bound")
    for name, array, axes in (
        ("q", q, "[T, Hq, D]"),
        ("pages", pages, "[NP, B, Hkv, 2, D]"),
        ("table", table, "[R, M]"),
        ("kv_lens", kv_lens, "[R]"),
        ("cu_q_lens", cu_q_lens, "[R + 1]"),
        ("num_decode", num_decode, "[]"),
    ):
        rank = len(axes.split(",")) if axes != "[]" else 0
        if jnp.ndim(array) != rank:
            raise ValueError(f"{name} of shape {jnp.shape(array)} must be {axes}")
    if q.dtype not in _DTYPES or pages.dtype not in _DTYPES:
        raise ValueError(
            f"q of {q.dtype} and pages of {pages.dtype} must be float32 or bfloat16"
        )
    _, query_heads, head_size = q.shape
    _, _, kv_heads, two, page_head_size = pages.shape
    if two != 2 or page_head_size != head_size:
        raise ValueError(
            f"pages of shape {pages.shape} must end in (2, D) with D={head_size} of q"
        )
    if query_heads % kv_heads or not query_heads:
        raise ValueError(f"Hq={query_heads} of q must be a multiple of {kv_heads=}")
    rows = table.shape[0]
    if kv_lens.shape != (rows,) or cu_q_lens.shape != (rows + 1,):
        raise ValueError(
            f"kv_lens of shape {kv_lens.shape} and cu_q_lens of shape "
            f"{cu_q_lens.shape} must be [R] and [R + 1], with R={rows} of table"
        )
