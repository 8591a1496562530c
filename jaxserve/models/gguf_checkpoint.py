"""A GGUF file: its metadata as a decoder's config, its tensors by Hugging Face name.

Owns GGUF's own conventions: names, reversed shapes, quantised blocks, re-ordered rotary
rows, and the rope factors kept as a tensor. Never sees a parameter pytree.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from jaxserve.models import rope
from jaxserve.models.decoder_config import AttentionKind, DecoderConfig

ARCHITECTURES = ("llama",)

ROPE_FACTORS = "rope_freqs.weight"
"""f32[D/2] that divide the rotary frequencies: how GGUF carries Llama 3's scaling."""

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor; one that has none keeps its own."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _NAMES:
        return name
    layer = f"model.layers.{match[1]}." if match[1] else ""
    return f"{layer}{_NAMES[match[2]]}.{match[3]}"


def unpermuted_rows(num_heads: int, head_dim: int) -> np.ndarray:
    """Which row of a llama GGUF's q or k is each original row: int[num_heads * D].

    The file pairs neighbours (rows 0, 1 turn together) where the original pairs halves:
    of a head of 8, the file keeps original rows 0, 4, 1, 5, 2, 6, 3, 7.
    """
    rows = np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)


class _Reader(gguf.GGUFReader):
    """A reader three times as fast: slices of a plain view of the file cost less than
    those of a memmap, and each word of a vocabulary takes several."""

    @property
    def data(self) -> Any:
        return self._data

    @data.setter
    def data(self, value: np.memmap) -> None:
        self._data = value.view(np.ndarray)


class GGUFFile:
    """Metadata and tensors of one file; a `TensorSource`."""

    def __init__(self, path: Path) -> None:
        """Map the file; raises ValueError naming what in it is not supported."""
        try:
            self._reader = _Reader(path)
        except (ValueError, IndexError) as error:
            raise ValueError(
                f"{path} is no whole GGUF file ({error}); give a .gguf file, or a "
                "directory with config.json and safetensors"
            ) from error
        self._tensors = {hf_name(t.name): t for t in self._reader.tensors}
        architecture = self.get("general.architecture")
        if architecture not in ARCHITECTURES:
            raise ValueError(
                f"general.architecture={architecture!r} in {path.name} is not "
                f"supported; known: {', '.join(ARCHITECTURES)}; for another family "
                "give its Hugging Face directory"
            )
        if self.get("split.count", 1) > 1:
            raise ValueError(
                f"{path.name} is one of {self.get('split.count')} parts, and parts are "
                "not supported; join them with llama-gguf-split --merge"
            )
        self._prefix = f"{architecture}."
        self._rope_factors = self._tensors.pop(ROPE_FACTORS, None)
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tuple(int(size) for size in reversed(tensor.shape))
            for name, tensor in self._tensors.items()
        }

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a metadata key, a list if it is an array."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def _need(self, key: str) -> Any:
        value = self.get(self._prefix + key)
        if value is None:
            raise ValueError(f"GGUF metadata lacks {self._prefix}{key}")
        return value

    def config(self, dtype: str) -> DecoderConfig:
        """The decoder that the metadata describe."""
        heads = self._need("attention.head_count")
        hidden = self._need("embedding_length")
        head_dim = self.get(self._prefix + "attention.key_length", hidden // heads)
        return DecoderConfig(
            vocab_size=self.shapes["model.embed_tokens.weight"][0],
            hidden_size=hidden,
            intermediate_size=self._need("feed_forward_length"),
            num_layers=self._need("block_count"),
            num_heads=heads,
            num_kv_heads=self.get(self._prefix + "attention.head_count_kv", heads),
            head_dim=head_dim,
            norm_epsilon=self._need("attention.layer_norm_rms_epsilon"),
            attention=(AttentionKind(self._rope(head_dim)),),
            tied="lm_head.weight" not in self._tensors,
            context_length=self._need("context_length"),
            eos_ids=(),  # the file's tokenizer knows them
            dtype=dtype,
        )

    def _rope(self, head_dim: int) -> rope.Rope:
        scaling = self.get(self._prefix + "rope.scaling.type", "none")
        if scaling != "none":
            raise ValueError(
                f"{self._prefix}rope.scaling.type={scaling!r} is not supported; "
                f"known: 'none', and Llama 3's factors in the tensor {ROPE_FACTORS}"
            )
        theta = self.get(self._prefix + "rope.freq_base", 10000.0)
        plain = rope.read_rope(head_dim, {"rope_theta": theta})
        if self._rope_factors is None:
            return plain
        factors = np.asarray(self._rope_factors.data, np.float32)
        frequencies = np.asarray(plain.frequencies, np.float32) / factors
        return rope.Rope(tuple(frequencies.tolist()))

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) in the original order, dequantised to float32."""
        tensor = self._tensors[name]
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            data = tensor.data[self._original_rows(name)[start:stop]]
        else:
            data = tensor.data[start:stop]
        try:
            return gguf.dequantize(data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ValueError(
                f"{tensor.name} is stored as {tensor.tensor_type.name}, which the gguf "
                "library cannot read; use a file of another quantisation, such as Q8_0"
            ) from error

    def _original_rows(self, name: str) -> np.ndarray:
        heads = self._need("attention.head_count")
        if "k_proj" in name:
            heads = self.get(self._prefix + "attention.head_count_kv", heads)
        return unpermuted_rows(heads, self.shapes[name][0] // heads)
