"""The kernels as JAX sees them: operands in, FFI calls, results out."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.cpu import PANEL, attention, job, linear, norm
from pallas_kernels.cpu.kinds import FLOATS, PAIRS, Kind

I32 = jnp.int32
_EVERYTHING = 2**30  # a window that no context fills


def kind_of(dtype: jax.typing.DTypeLike) -> Kind:
    """What a word of such an array is."""
    return PAIRS if jnp.dtype(dtype) == jnp.bfloat16 else FLOATS


def attend(
    q: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    *,
    scale: float,
    window: int | jax.Array | None,
    checked: bool,
) -> jax.Array:
    """Attention of queries [T, Hq, D] of the pages' dtype; as `paged_attention`."""
    out = jax.ShapeDtypeStruct(q.shape, pages.dtype)
    call = jax.ffi.ffi_call(
        attention.target(kind_of(pages.dtype)),
        (out, *_room(out, pages.shape[2], table.shape[0])),
    )
    return call(
        q, pages, *_rows(table, kv_lens, cu_q_lens), *_options(scale, window, checked)
    )[0]


def write_and_attend(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    pages: jax.Array,
    page_ids: jax.Array,
    offsets: jax.Array,
    table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    *,
    scale: float,
    window: int | jax.Array | None,
    checked: bool,
) -> tuple[jax.Array, jax.Array]:
    """As `rotary_attention`; the pages are written in place where XLA can."""
    tokens, heads, head = qkv.shape
    kv_heads = pages.shape[2]
    out = jax.ShapeDtypeStruct((tokens, heads - 2 * kv_heads, head), pages.dtype)
    new_pages = jax.ShapeDtypeStruct(pages.shape, pages.dtype)
    call = jax.ffi.ffi_call(
        attention.target(kind_of(pages.dtype)),
        (out, *_room(out, kv_heads, table.shape[0]), new_pages, out),
        input_output_aliases={1: 4},
    )
    out, _, _, _, pages, _ = call(
        qkv,
        pages,
        *_rows(table, kv_lens, cu_q_lens),
        *_options(scale, window, checked),
        cos,
        sin,
        page_ids.astype(I32),
        offsets.astype(I32),
    )
    return out, pages


def multiply(
    x: jax.Array,
    words: jax.Array,
    layer: jax.Array | int,
    rows: jax.Array | int,
    mode: int,
    residual: jax.Array | None = None,
) -> jax.Array:
    """f32[T, N] = x[T, K] times layer `layer` of packed words, or as `mode` says.

    Only the first `rows` rows are computed.
    """
    kind = PAIRS if words.ndim == 5 else FLOATS
    dtype = jnp.dtype(jnp.bfloat16 if kind is PAIRS else jnp.float32)
    columns = words.shape[1] * PANEL
    if mode in (linear.GATED, linear.GATED_GELU):
        out = jax.ShapeDtypeStruct((x.shape[0], columns // 2), dtype)
    else:
        out = jax.ShapeDtypeStruct((x.shape[0], columns), jnp.float32)
    numbers = (jnp.asarray(n, I32) for n in (layer, mode, rows))
    operands: list[Any] = [x.astype(dtype), words, *numbers]
    aliases = {}
    if mode == linear.ADD:
        operands.append(residual)
        aliases = {5: 0}
    call = jax.ffi.ffi_call(linear.target(kind), out, input_output_aliases=aliases)
    return call(*operands)


def normalize(
    x: jax.Array,
    scales: jax.Array,
    layer: jax.Array | int,
    epsilon: float,
    rows: jax.Array | int,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """[T, D] of `dtype`: x[T, D] by rows, normalised, times scales[layer] of [L, D].

    Only the first `rows` rows are computed.
    """
    call = jax.ffi.ffi_call(
        norm.target(kind_of(dtype)), jax.ShapeDtypeStruct(x.shape, dtype)
    )
    layer, rows = jnp.asarray(layer, I32), jnp.asarray(rows, I32)
    return call(x, scales, layer, jnp.float32(epsilon), rows)


def _room(
    out: jax.ShapeDtypeStruct, kv_heads: int, rows: int
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Results that only the call itself uses."""
    tokens, heads, head = out.shape
    tiles = -(-tokens // job.tile_tokens(heads // kv_heads)) + 2 * rows
    return (
        jax.ShapeDtypeStruct((tiles, job.TILE_WORDS), I32),
        jax.ShapeDtypeStruct((3, rows), I32),
        jax.ShapeDtypeStruct((rows, heads, head + 2), jnp.float32),
    )


def _rows(
    table: jax.Array, kv_lens: jax.Array, cu_q_lens: jax.Array
) -> tuple[jax.Array, ...]:
    return table.astype(I32), kv_lens.astype(I32), cu_q_lens.astype(I32)


def _options(
    scale: float, window: int | jax.Array | None, checked: bool
) -> tuple[jax.Array, ...]:
    if window is None:
        window = _EVERYTHING
    elif isinstance(window, int):
        window = min(window, _EVERYTHING)
    return jnp.float32(scale), jnp.asarray(window, I32), jnp.int32(checked)
