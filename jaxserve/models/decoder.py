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
from pallas_kernels.api import paged_attention, write_kv


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

    def forward(
        self, params: Params, pages: Pages, batch: Batch
    ) -> tuple[jax.Array, Pages]:
        """Write the batch's KV rows, attend, and return (f32[R, V] logits, pages).

        Padding is finite throughout and writes nothing; its logits mean nothing.
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
        )

        def layer(
            carry: tuple[jax.Array, jax.Array], scanned: tuple[Params, jax.Array]
        ) -> tuple[tuple[jax.Array, jax.Array], None]:
            weights, first_page = scanned
            return _layer(c, weights, *carry, first_page, batch, shared), None

        x = params["embed"][batch.tokens].astype(jnp.float32)
        # The pages are carried: as scanned inputs and outputs they would be copied.
        first_pages = jnp.arange(c.num_layers, dtype=jnp.int32) * num_blocks
        (x, kv), _ = jax.lax.scan(layer, (x, kv), (params["layers"], first_pages))
        x = layers.rms_norm(x[batch.logit_index], params["norm"], c.norm_epsilon)
        head = params["embed"] if c.tied else params["head"]
        return layers.project_to_vocab(x, head), {"kv": kv}


class _Shared(NamedTuple):
    """What every layer of one forward pass needs and none changes."""

    cos: jax.Array  # f32[T, D/2]
    sin: jax.Array  # f32[T, D/2]
    table: jax.Array  # i32[R, M] blocks, holes replaced by a valid one
    offset: jax.Array  # i32[T] KV row inside the block


def _layer(
    c: DecoderConfig,
    weights: Params,
    x: jax.Array,
    kv: jax.Array,
    first_page: jax.Array,
    batch: Batch,
    shared: _Shared,
) -> tuple[jax.Array, jax.Array]:
    """One layer: f32[T, d] and pages in, both out; its pages start at first_page."""
    tokens = x.shape[0]
    num_blocks = kv.shape[0] // c.num_layers
    normed = layers.rms_norm(x, weights["attention_norm"], c.norm_epsilon)
    qkv = layers.linear(normed, weights["qkv"])
    qkv = qkv.reshape(tokens, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
    q, k, v = jnp.split(qkv, [c.num_heads, c.num_heads + c.num_kv_heads], axis=1)
    q = rope.rotate(q, shared.cos, shared.sin)
    k = rope.rotate(k, shared.cos, shared.sin)
    # Write none must lie past the last page of all, not of this layer.
    page = jnp.where(
        batch.write_block < num_blocks, batch.write_block + first_page, kv.shape[0]
    )
    kv = write_kv(kv, k, v, page, shared.offset)
    attended = paged_attention(
        q.astype(kv.dtype),
        kv,
        shared.table + first_page,
        batch.kv_lens,
        batch.cu_q_lens,
        batch.num_decode,
        scale=c.head_dim**-0.5,
    )
    x = x + layers.linear(attended.reshape(tokens, -1), weights["output"])
    normed = layers.rms_norm(x, weights["mlp_norm"], c.norm_epsilon)
    return x + layers.gated_mlp(normed, weights["gate_up"], weights["down"]), kv
