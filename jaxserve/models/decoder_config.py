"""What tells one dense decoder from another.

Owns the configuration that the forward pass is driven by, and its rules. Never sees a
file or an array: families.py says what a checkpoint's config means in these terms.

Axes: V vocabulary, L layers, Hq and Hkv query and KV heads, D head size, d hidden size,
F MLP width.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

from jaxserve.models.rope import Rope


class AttentionKind(NamedTuple):
    """What the layers of a decoder may differ in.

    Attributes:
      rope: how positions turn queries and keys.
      window: positions that a token attends to, its own the last; None: all.
    """

    rope: Rope
    window: int | None = None


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
      attention: the kinds of attention layers; most decoders have one.
      layer_kinds: which kind each layer is, L indices; empty: all are the first.
      attention_scale: factor on the attention's logits; None: D**-0.5.
      attention_soft_cap: bounds them, scaled, by tanh; None: no bound.
      qkv_bias: queries, keys and values have a bias.
      qk_norm: queries and keys are RMS-normalised by head before they turn.
      post_norms: what attention and MLP add to the residual is RMS-normalised.
      activation: of the MLP's gate; "gelu_tanh" is GELU in its tanh approximation.
      embedding_scale: factor on embeddings, rounded to `dtype`.
      logit_soft_cap: bounds the logits by tanh; None: no bound.
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
    attention: tuple[AttentionKind, ...]
    tied: bool
    context_length: int
    eos_ids: tuple[int, ...]
    dtype: str
    layer_kinds: tuple[int, ...] = ()
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embedding_scale: float = 1.0
    logit_soft_cap: float | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must be a multiple of "
                f"num_kv_heads={self.num_kv_heads}; check the checkpoint's config"
            )
        for kind in self.attention:
            pairs = len(kind.rope.frequencies)
            if pairs * 2 != self.head_dim:
                raise ValueError(
                    f"rope has {pairs} frequencies and head_dim={self.head_dim} needs "
                    f"{self.head_dim // 2}: one a pair"
                )
            if kind.window is not None and kind.window < 1:
                raise ValueError(
                    f"window={kind.window} must be at least 1: a token sees itself; "
                    "None if it sees all"
                )
        of_layers, kinds = self.layer_kinds, range(len(self.attention))
        if len(of_layers) not in (0, self.num_layers) or not kinds.stop:
            raise ValueError(
                f"layer_kinds has {len(of_layers)} entries for {kinds.stop} kinds and "
                f"num_layers={self.num_layers}; give one a layer, or none"
            )
        if any(kind not in kinds for kind in of_layers):
            raise ValueError(
                f"layer_kinds={of_layers} must index the {kinds.stop} kinds given"
            )
        if self.dtype not in ("bfloat16", "float32"):
            raise ValueError(f"dtype={self.dtype!r} must be 'bfloat16' or 'float32'")
