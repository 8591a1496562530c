"""A Hugging Face model directory: config.json, generation_config.json, safetensors.

Owns the reading of these files. Never sees a parameter pytree or a tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxserve.models.families import Described, describe

# Buffers that old exporters wrote beside the parameters; recomputed, never read.
IGNORED = re.compile(r"rotary_emb\.inv_freq$|masked_bias$|attn\.bias$")


def read_config(
    directory: Path, dtype: str, max_model_len: int | None = None
) -> Described:
    """What config.json describes; EOS ids joined with the generation's.

    Raises ValueError naming the field that this package has no code for.
    """
    top = _read_json(directory / "config.json")
    own = {"architectures": top.get("architectures")}
    text = {**top, **top.get("text_config", {}), **own}
    generation = _read_json(directory / "generation_config.json", missing_ok=True)
    eos = {*_ids(text.get("eos_token_id")), *_ids(generation.get("eos_token_id"))}
    return describe(text, eos_ids=eos, dtype=dtype, longest=max_model_len)


def _ids(value: int | list[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def _read_json(path: Path, missing_ok: bool = False) -> dict[str, Any]:
    if not path.exists():
        if missing_ok:
            return {}
        raise FileNotFoundError(f"{path} is missing; is this a model directory?")
    return json.loads(path.read_text(encoding="utf-8"))


class SafetensorsSource:
    """A `TensorSource` over model.safetensors, or the shards that an index lists."""

    def __init__(self, directory: Path) -> None:
        """Open the files; raises FileNotFoundError naming a missing shard."""
        files, listed = ["model.safetensors"], ""
        index = directory / "model.safetensors.index.json"
        if not (directory / files[0]).exists() and index.exists():
            files = sorted(set(_read_json(index)["weight_map"].values()))
            listed = f", a shard that {index.name} lists,"
        self._slices: dict[str, Any] = {}
        for file in files:
            path = directory / file
            if not path.exists():
                raise FileNotFoundError(f"{path}{listed} is missing; fetch it again")
            try:
                shard = safe_open(path, framework="np")
            except SafetensorError as error:
                raise ValueError(
                    f"{path} is damaged: {error}; fetch it again"
                ) from None
            for name in shard.keys():
                if not IGNORED.search(name):
                    self._slices[name] = shard.get_slice(name)
                    _check_float(name, self._slices[name].get_dtype())
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tuple(part.get_shape()) for name, part in self._slices.items()
        }

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Elements [start, stop) of the first axis; bfloat16 as ml_dtypes has it."""
        return self._slices[name][start:stop]


def _check_float(name: str, dtype: str) -> None:
    known = ("BF16", "F16", "F32", "F64")
    if dtype not in known:
        raise ValueError(
            f"{name} is stored as {dtype}, and only {', '.join(known)} are weights as "
            "they stand; use a checkpoint that is not quantised, or a GGUF file"
        )
