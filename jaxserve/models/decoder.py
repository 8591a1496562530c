"""One dense decoder, driven by configuration: Llama, Mistral, Qwen, Gemma, Phi-3 ...

Owns the forward pass over a ragged batch, the same without a cache, and the shape of
its KV pages and parameters.
Never sees a file, a tokenizer or a request.

Axes: see base.py and decoder_config.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jaxserve.models import layers, rope
from jaxserve.models.base import Batch, Pages, Params
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.dense_attention import dense_attention
from pallas_kernels import EVERYTHING, rotary_attention
from pallas_kernels.packed import Packed, pack


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A `Model`: pure functions over params and pages, for one configuration."""

    config: DecoderConfig

    @property
    def vocab_size(self) -> int:
        """V, the width of the logits."""
        return self.config.vocab_size

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Token ids that end a sequence unless the request ignores them."""
        return self.config.eos_ids

    def page_shapes(
        self, num_blocks: int, block_size: int
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """{"kv": [L*P, B, Hkv, 2, D]}: layers are folded into pages, so that one array
        is carried through the layers and written in place."""
        c = self.config
        shape = (c.num_layers * num_blocks, block_size, c.num_kv_heads, 2, c.head_dim)
        return {"kv": jax.ShapeDtypeStruct(shape, jnp.dtype(c.dtype))}

    def prepare(self, params: Params) -> Params:
        """The weights as this machine's kernels read them, where it has kernels.

        `forward` takes both layouts, of the same numbers in as many bytes. Costs
        O(weights) once, and each stack is there twice while it is converted.
        """
        stacks = params["layers"]
        prepared = {
            **params,
            "layers": {
                **stacks,
                **{name: _pack(stacks[name]) for name in ("qkv", "output", "down")},
                "gate_up": _pack(stacks["gate_up"], gated=True),
            },
        }
        head = "embed" if self.config.tied else "head"
        prepared[head] = _pack_head(params[head])
        return prepared

    def forward(
        self, params: Params, pages: Pages, batch: Batch
    ) -> tuple[jax.Array, Pages]:
        """Write the batch's KV rows, attend, and return (f32[T, d], pages).

        Padding writes nothing.
        """
        c, kv, used = self.config, pages["kv"], batch.num_tokens
        num_blocks = kv.shape[0] // c.num_layers
        attention_of = _attention_of(c, batch.positions)
        offsets = batch.positions % kv.shape[1]
        # Kernels read what the table names, so a hole must be a page too.
        table = jnp.clip(batch.table, 0, num_blocks - 1)

        def layer(
            carry: tuple[jax.Array, jax.Array], index: jax.Array
        ) -> tuple[tuple[jax.Array, jax.Array], None]:
            x, kv = carry
            first_page = index * num_blocks

            def attend(qkv: jax.Array) -> tuple[jax.Array, jax.Array]:
                attention = attention_of(index)
                # Write none must lie past the last page of all, not of this layer.
                page = jnp.where(
                    batch.write_block < num_blocks,
                    batch.write_block + first_page,
                    kv.shape[0],
                )
                return rotary_attention(
                    qkv,
                    attention.cos,
                    attention.sin,
                    kv,
                    page,
                    offsets,
                    table + first_page,
                    batch.kv_lens,
                    batch.cu_q_lens,
                    batch.num_decode,
                    scale=_scale(c),
                    window=attention.window,
                    soft_cap=c.attention_soft_cap,
                )

            return _layer(c, params["layers"], index, x, attend, used), None

        x = _embed(c, params, batch.tokens)
        # The pages are carried: as scanned inputs and outputs they would be copied.
        indices = jnp.arange(c.num_layers, dtype=jnp.int32)
        (x, kv), _ = jax.lax.scan(layer, (x, kv), indices)
        return x, {"kv": kv}

    def logits(
        self, params: Params, hidden: jax.Array, index: jax.Array, used: jax.Array
    ) -> jax.Array:
        """f32[K, V] after tokens i32[K]; past `used` i32[] they are undefined."""
        c = self.config
        head = params["embed"] if c.tied else params["head"]
        x, scales = hidden[index], params["norm"][None]
        x = layers.rms_norm(x, scales, 0, c.norm_epsilon, head, used)
        logits = layers.project_to_vocab(x, head, used)
        if c.logit_soft_cap is not None:
            cap = jnp.float32(c.logit_soft_cap)
            logits = cap * jnp.tanh(logits / cap)
        return logits

    def sequence_logits(
        self, params: Params, tokens: jax.Array, positions: jax.Array
    ) -> jax.Array:
        """Logits of whole sequences without a cache, for a program that learns.

        Differentiable by `params` where they are in the plain layout; layers are
        computed again on the way back. What lies behind a position does not count, so
        that sequences may be padded on the right. Attention takes memory of B x Hq x T
        x T.

        Args:
          tokens: i32[B, T] sequences from position 0 on.
          positions: i32[B, K] those whose next token the logits are for.

        Returns f32[B, K, V].
        """
        c = self.config
        rows, length = tokens.shape
        used = jnp.int32(tokens.size)
        each = jnp.tile(jnp.arange(length, dtype=jnp.int32), rows)
        attention_of = _attention_of(c, each)

        @jax.checkpoint
        def layer(
            x: jax.Array, stacks: tuple[Params, jax.Array]
        ) -> tuple[jax.Array, None]:
            weights, index = stacks

            def attend(qkv: jax.Array) -> tuple[jax.Array, None]:
                attention = attention_of(index)
                out = dense_attention(
                    qkv,
                    attention.cos,
                    attention.sin,
                    rows=rows,
                    kv_heads=c.num_kv_heads,
                    dtype=jnp.dtype(c.dtype),
                    scale=_scale(c),
                    window=attention.window,
                    soft_cap=c.attention_soft_cap,
                )
                return out, None

            one = jax.tree.map(lambda weight: weight[None], weights)
            return _layer(c, one, jnp.int32(0), x, attend, used)[0], None

        # Scanned over, so that the gradient of a layer's weights is as large as they.
        indices = jnp.arange(c.num_layers, dtype=jnp.int32)
        x = _embed(c, params, tokens.reshape(-1))
        x, _ = jax.lax.scan(layer, x, (params["layers"], indices))
        starts = jnp.arange(rows, dtype=jnp.int32) * length
        index = (starts[:, None] + positions).reshape(-1)
        logits = self.logits(params, x, index, jnp.int32(index.size))
        return logits.reshape(*positions.shape, -1)


def _embed(c: DecoderConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """f32[T, d] of i32[T]."""
    x = layers.embed(tokens, params["embed"])
    if c.embedding_scale != 1:
        # Gemma was trained with the scale in its weights' dtype.
        x = x * jnp.asarray(c.embedding_scale, c.dtype).astype(jnp.float32)
    return x


def _scale(c: DecoderConfig) -> float:
    """Of the attention's logits."""
    return c.head_dim**-0.5 if c.attention_scale is None else c.attention_scale


class _Attention(NamedTuple):
    """What sets a layer's attention apart."""

    cos: jax.Array  # f32[T, D/2]
    sin: jax.Array  # f32[T, D/2]
    window: int | jax.Array | None


KV = TypeVar("KV", jax.Array, None)


def _layer(
    c: DecoderConfig,
    weights: Params,
    index: jax.Array,
    x: jax.Array,
    attend: Callable[[jax.Array], tuple[jax.Array, KV]],
    used: jax.Array,
) -> tuple[jax.Array, KV]:
    """One layer: f32[T, d] in and out.

    Args:
      weights: stacks, of which the layer's are number `index`.
      attend: f32[T, Hq + 2 Hkv, D] to [T, Hq, D], and what it leaves of the pages.
      used: i32[] tokens that are no padding.
    """
    tokens, epsilon = x.shape[0], c.norm_epsilon
    scales = weights["attention_norm"]
    normed = layers.rms_norm(x, scales, index, epsilon, weights["qkv"], used)
    qkv = layers.linear(normed, weights["qkv"], index, used)
    if c.qkv_bias:
        qkv = qkv + weights["qkv_bias"][index][None]
    qkv = qkv.reshape(tokens, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
    if c.qk_norm:
        qkv = _normalise_heads(c, qkv, weights, index, used)
    attended, kv = attend(qkv)
    x = _add(c, x, attended.reshape(tokens, -1), weights, "output", index, used)
    scales = weights["mlp_norm"]
    normed = layers.rms_norm(x, scales, index, epsilon, weights["gate_up"], used)
    gated = layers.gated_linear(normed, weights["gate_up"], index, used, c.activation)
    return _add(c, x, gated, weights, "down", index, used), kv


def _add(
    c: DecoderConfig,
    x: jax.Array,
    y: jax.Array,
    weights: Params,
    name: str,
    index: jax.Array,
    used: jax.Array,
) -> jax.Array:
    """The residual f32[T, d] plus the linear layer `name` of y."""
    if not c.post_norms:
        return layers.add_linear(x, y, weights[name], index, used)
    added = layers.linear(y, weights[name], index, used)
    scales = weights[f"{name}_norm"]
    return x + layers.normalize(
        added, scales, index, c.norm_epsilon, weights[name], used
    )


def _normalise_heads(
    c: DecoderConfig, qkv: jax.Array, weights: Params, index: jax.Array, used: jax.Array
) -> jax.Array:
    """f32[T, Hq + 2 Hkv, D] with each head of queries and keys normalised."""
    queries, keys, values = jnp.split(
        qkv, [c.num_heads, c.num_heads + c.num_kv_heads], axis=1
    )

    def normalised(heads: jax.Array, name: str) -> jax.Array:
        rows = heads.reshape(-1, c.head_dim)
        count = used * heads.shape[1]
        epsilon, linear = c.norm_epsilon, weights["qkv"]
        rows = layers.normalize(rows, weights[name], index, epsilon, linear, count)
        return rows.reshape(heads.shape)

    parts = [normalised(queries, "q_norm"), normalised(keys, "k_norm"), values]
    return jnp.concatenate(parts, axis=1)


def _attention_of(
    c: DecoderConfig, positions: jax.Array
) -> Callable[[jax.Array], _Attention]:
    """What a layer's attention needs to know, by the layer's number i32[].

    Layers of all kinds are one program: what they differ in is looked up.
    """
    tables = [rope.angles(positions, kind.rope) for kind in c.attention]
    windows = [kind.window for kind in c.attention]
    if not c.layer_kinds:
        one = _Attention(*tables[0], windows[0])
        return lambda index: one
    kinds = jnp.asarray(c.layer_kinds, jnp.int32)
    cos, sin = (jnp.stack(parts) for parts in zip(*tables, strict=True))
    limits = jnp.asarray([w or EVERYTHING for w in windows], jnp.int32)

    def look_up(index: jax.Array) -> _Attention:
        kind = kinds[index]
        window = limits[kind] if any(windows) else None
        return _Attention(cos[kind], sin[kind], window)

    return look_up


def _pack(weight: layers.Weight, *, gated: bool = False) -> layers.Weight:
    if isinstance(weight, Packed):
        return weight
    try:
        return pack(weight, gated=gated)
    except NotImplementedError:
        return weight


def _pack_head(embedding: layers.Weight) -> layers.Weight:
    """The head [V, d] as the weights [1, d, V] of a linear layer."""
    if isinstance(embedding, Packed):
        return embedding
    packed = _pack(embedding.T[None])
    return packed if isinstance(packed, Packed) else embedding
