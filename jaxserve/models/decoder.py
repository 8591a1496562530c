"""One dense decoder, driven by configuration: Llama 2 and 3, SmolLM2.

Owns the forward pass over a ragged batch and the shape of its KV pages and parameters.
Never sees a file, a tokenizer or a request.

Axes: see base.py; L layers, Hq and Hkv query and KV heads, D head size, d hidden size,
F MLP width.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.models import layers, rope
from jaxserve.models.base import Batch, Pages, Params
from pallas_kernels import rotary_attention
from pallas_kernels.packed import Packed, pack


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """What tells one dense decoder from another; hashable, static under jit.

    Attributes:
      vocab_size: V.
      hidden_size: d.
      intermediate_size: F.
      num_layers: L.
      num_heads: Hq.
      num_kv_heads: Hkv; divides Hq.
      head_dim: D.
      norm_epsilon: of every RMS norm.
      rope_frequencies: D/2 radians a position, any context scaling applied.
      tied: the output head is the embedding.
      context_length: most positions the checkpoint was made for.
      eos_ids: token ids that end a sequence.
      dtype: "bfloat16" or "float32", of weights and KV pages.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_epsilon: float
    rope_frequencies: tuple[float, ...]
    tied: bool
    context_length: int
    eos_ids: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must be a multiple of "
                f"num_kv_heads={self.num_kv_heads}; check the checkpoint's config"
            )
        if len(self.rope_frequencies) * 2 != self.head_dim:
            raise ValueError(
                f"rope_frequencies has {len(self.rope_frequencies)} entries and "
                f"head_dim={self.head_dim} needs {self.head_dim // 2}: one a pair"
            )
        if self.dtype not in ("bfloat16", "float32"):
            raise ValueError(f"dtype={self.dtype!r} must be 'bfloat16' or 'float32'")


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
        """Write the batch's KV rows, attend, and return (f32[R, V] logits, pages).

        Padding writes nothing, and rows past `num_logits` have no defined logits.
        """
        c = self.config
        kv = pages["kv"]
        num_blocks = kv.shape[0] // c.num_layers
        cos, sin = rope.angles(batch.positions, c.rope_frequencies)
        shared = _Shared(
            cos=cos,
            sin=sin,
            # Kernels read what the table names, so a hole must be a page too.
            table=jnp.clip(batch.table, 0, num_blocks - 1),
            offset=batch.positions % kv.shape[1],
            used=batch.num_tokens,
        )

        def layer(
            carry: tuple[jax.Array, jax.Array], index: jax.Array
        ) -> tuple[tuple[jax.Array, jax.Array], None]:
            return _layer(c, params["layers"], index, *carry, batch, shared), None

        x = layers.embed(batch.tokens, params["embed"])
        # The pages are carried: as scanned inputs and outputs they would be copied.
        indices = jnp.arange(c.num_layers, dtype=jnp.int32)
        (x, kv), _ = jax.lax.scan(layer, (x, kv), indices)
        head = params["embed"] if c.tied else params["head"]
        x = x[batch.logit_index]
        scales, rows = params["norm"][None], batch.num_logits
        x = layers.rms_norm(x, scales, 0, c.norm_epsilon, head, rows)
        return layers.project_to_vocab(x, head, rows), {"kv": kv}


class _Shared(NamedTuple):
    """What every layer of one forward pass needs and none changes."""

    cos: jax.Array  # f32[T, D/2]
    sin: jax.Array  # f32[T, D/2]
    table: jax.Array  # i32[R, M] blocks, holes replaced by a valid one
    offset: jax.Array  # i32[T] KV row inside the block
    used: jax.Array  # i32[] tokens that are no padding


def _layer(
    c: DecoderConfig,
    weights: Params,
    index: jax.Array,
    x: jax.Array,
    kv: jax.Array,
    batch: Batch,
    shared: _Shared,
) -> tuple[jax.Array, jax.Array]:
    """Layer number `index`: f32[T, d] and pages in, both out."""
    tokens = x.shape[0]
    num_blocks = kv.shape[0] // c.num_layers
    first_page = index * num_blocks
    epsilon, scales, used = c.norm_epsilon, weights["attention_norm"], shared.used
    normed = layers.rms_norm(x, scales, index, epsilon, weights["qkv"], used)
    qkv = layers.linear(normed, weights["qkv"], index, used)
    # Write none must lie past the last page of all, not of this layer.
    page = jnp.where(
        batch.write_block < num_blocks, batch.write_block + first_page, kv.shape[0]
    )
    attended, kv = rotary_attention(
        qkv.reshape(tokens, c.num_heads + 2 * c.num_kv_heads, c.head_dim),
        shared.cos,
        shared.sin,
        kv,
        page,
        shared.offset,
        shared.table + first_page,
        batch.kv_lens,
        batch.cu_q_lens,
        batch.num_decode,
        scale=c.head_dim**-0.5,
    )
    attended = attended.reshape(tokens, -1)
    x = layers.add_linear(x, attended, weights["output"], index, used)
    scales = weights["mlp_norm"]
    normed = layers.rms_norm(x, scales, index, epsilon, weights["gate_up"], used)
    gated = layers.gated_linear(normed, weights["gate_up"], index, used)
    return layers.add_linear(x, gated, weights["down"], index, used), kv


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
