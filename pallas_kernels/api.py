"""The one attention interface over paged KV, and the one way to write KV rows.

Owns what the arguments mean and the order in which implementations are tried. Never
sees a layer, a model or a block pool: the caller folds layers into pages.

Axes: T tokens of the batch, R rows (sequences), M columns of a row's block list,
NP pages (layers x blocks), B tokens a page, Hq query heads, Hkv KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels import cpu, reference, rotary, xla
from pallas_kernels.arguments import check, check_rotary

Implementation = Callable[..., jax.Array]
"""`paged_attention` without the name; NotImplementedError: not for these arguments."""

IMPLEMENTATIONS: dict[str, Implementation] = {
    "cpu": cpu.paged_attention,
    "xla": xla.paged_attention,
    "reference": reference.paged_attention,
}
"""By name, in the order tried."""


def paged_attention(
    q: jax.Array,  # [T, Hq, D] f32 or bf16
    pages: jax.Array,  # [NP, B, Hkv, 2, D] f32 or bf16; K is [..., 0, :], V [..., 1, :]
    table: jax.Array,  # i32[R, M] page behind each column; every entry in [0, NP)
    kv_lens: jax.Array,  # i32[R] KV rows to attend to, the batch's own included
    cu_q_lens: jax.Array,  # i32[R + 1] where each row's tokens start
    num_decode: jax.Array | int,  # i32[] rows of exactly one token; they come first
    *,
    scale: float,
    window: int | jax.Array | None = None,
    soft_cap: float | None = None,
    implementation: str | None = None,
) -> jax.Array:  # [T, Hq, D], dtype of q
    """Causal attention of a ragged batch: decode rows first, then prompt chunks.

    Query j of a row with n queries sits at position kv_len - n + j and attends to the
    row's KV rows up to and including that position. Query head h reads KV head
    h // (Hq // Hkv). The softmax is in float32. The batch's own KV rows must have been
    written before (`write_kv`).

    Rows [0, num_decode) hold exactly one token each, idle ones (kv_len 0) included;
    later rows hold kv_len >= n >= 0 tokens. Tokens of idle rows and tokens past
    cu_q_lens[R] come out finite. KV rows past a row's kv_len may hold anything, NaN
    included.

    Args:
      num_decode: a Python int says that the number is known when the program is traced;
        where it is R, an implementation may leave out its code for chunks.
      scale: factor on the logits, usually D**-0.5.
      window: a token attends to this many positions at most, its own the last; None: to
        all. An i32[] where it is known only when the program runs, as where layers
        differ; `EVERYTHING` is then the number for all.
      soft_cap: bounds the logits: soft_cap * tanh(logit / soft_cap); None: no bound.
      implementation: a name in `IMPLEMENTATIONS`; None takes the first that accepts the
        arguments.

    Raises:
      ValueError: a shape or dtype breaks the rules above, or the name is unknown.
      NotImplementedError: the named implementation does not take these arguments.
      ExceptionGroup: none takes them; it holds the reason of each.
    """
    check(q, pages, table, kv_lens, cu_q_lens, num_decode, window, soft_cap)
    arguments = (q, pages, table, kv_lens, cu_q_lens, num_decode)
    options = {"scale": scale, "window": window, "soft_cap": soft_cap}
    if implementation is not None:
        if implementation not in IMPLEMENTATIONS:
            known = ", ".join(map(repr, IMPLEMENTATIONS))
            raise ValueError(f"{implementation=} is unknown; known are {known}")
        return IMPLEMENTATIONS[implementation](*arguments, **options)
    errors: list[Exception] = []
    for name, attend in IMPLEMENTATIONS.items():
        try:
            return attend(*arguments, **options)
        except NotImplementedError as error:
            error.add_note(f"from implementation {name!r}")
            errors.append(error)
    raise ExceptionGroup("no implementation of paged_attention applies", errors)


def write_kv(
    pages: jax.Array,  # [NP, B, Hkv, 2, D]
    k: jax.Array,  # [T, Hkv, D]
    v: jax.Array,  # [T, Hkv, D]
    page_ids: jax.Array,  # i32[T]; NP or more writes nothing
    offsets: jax.Array,  # i32[T] in [0, B)
) -> jax.Array:  # pages
    """Write row t of k and v to pages[page_ids[t], offsets[t]], in place when donated.

    K and V are rounded to the pages' dtype. Two tokens must not share an address. A
    negative page id is no sentinel: like any JAX index it counts from the end.
    """
    rows = jnp.stack([k, v], axis=2).astype(pages.dtype)  # [T, Hkv, 2, D]
    return pages.at[page_ids, offsets].set(rows, mode="drop")


def rotary_attention(
    qkv: jax.Array,  # f32[T, Hq + 2 Hkv, D] queries, then keys, then values
    cos: jax.Array,  # f32[T, D / 2]
    sin: jax.Array,  # f32[T, D / 2]
    pages: jax.Array,  # [NP, B, Hkv, 2, D] f32 or bf16
    page_ids: jax.Array,  # i32[T], not negative; NP or more writes nothing
    offsets: jax.Array,  # i32[T] in [0, B)
    table: jax.Array,  # i32[R, M]
    kv_lens: jax.Array,  # i32[R]
    cu_q_lens: jax.Array,  # i32[R + 1]
    num_decode: jax.Array | int,  # i32[]
    *,
    scale: float,
    window: int | jax.Array | None = None,
    soft_cap: float | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:  # [T, Hq, D] of the pages' dtype, pages
    """Rotate queries and keys, write the batch's KV, and attend: a layer's attention.

    `rotary.rotate`, `write_kv` and `paged_attention` in one, for the implementations
    that gain by it; the arguments and errors are theirs.
    """
    check_rotary(qkv, cos, sin, pages, page_ids, offsets)
    rest = (table, kv_lens, cu_q_lens, num_decode)
    options = {"scale": scale, "window": window, "soft_cap": soft_cap}
    kv_heads = pages.shape[2]
    heads = qkv.shape[1] - 2 * kv_heads
    check(qkv[:, :heads], pages, *rest, window, soft_cap)
    if implementation in (None, "cpu"):
        try:
            return cpu.rotary_attention(
                qkv, cos, sin, pages, page_ids, offsets, *rest, **options
            )
        except NotImplementedError:
            if implementation is not None:
                raise
    q, k, v = jnp.split(qkv, [heads, heads + kv_heads], axis=1)
    q, k = rotary.rotate(q, cos, sin), rotary.rotate(k, cos, sin)
    pages = write_kv(pages, k, v, page_ids, offsets)
    out = paged_attention(
        q.astype(pages.dtype), pages, *rest, **options, implementation=implementation
    )
    return out, pages
