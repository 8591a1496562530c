"""The tiny models of the decoder's families as checkpoints, and their references.

The fixtures are tests/fixtures/families (tools/tiny_families.py): configs, the names
and shapes of the tensors, and what transformers makes of them.
"""

from __future__ import annotations

import functools
import json
import pathlib
from typing import NamedTuple

import numpy as np
from safetensors.numpy import save_file

from tools.tiny_noise import noise

FIXTURES = pathlib.Path(__file__).resolve().parents[1] / "fixtures" / "families"
VARIANTS = tuple(sorted(path.name for path in FIXTURES.iterdir()))

SHORT_CONTEXT = 32
"""Of the variants with longrope: the context within which the short table holds."""


class Reference(NamedTuple):
    """Of one prompt, by transformers in float32."""

    prompt: list[int]
    tokens: list[int]  # greedy
    logits: np.ndarray  # f32[n, V] after every token of both but the last


@functools.cache
def reference(variant: str) -> tuple[Reference, ...]:
    with np.load(FIXTURES / variant / "reference.npz") as saved:
        tokens, lengths = saved["tokens"], saved["prompt_lengths"]
        prompts = np.split(saved["prompt_ids"], np.cumsum(lengths)[:-1])
        ends = np.cumsum(lengths + tokens.shape[1] - 1)
        logits = np.split(saved["logits"], ends[:-1])
    return tuple(
        Reference(prompt.tolist(), row.tolist(), values)
        for prompt, row, values in zip(prompts, tokens, logits, strict=True)
    )


def max_model_len(variant: str) -> int:
    """The most positions that the variant's reference holds for."""
    return SHORT_CONTEXT if variant == "phi3_longrope_short" else 64


def tensors(variant: str) -> dict[str, np.ndarray]:
    shapes = json.loads((FIXTURES / variant / "tensors.json").read_text())
    return {name: noise(name, tuple(shape)) for name, shape in shapes.items()}


def write(directory: pathlib.Path, variant: str, **fields) -> pathlib.Path:
    """The checkpoint, some fields of its config changed; `...` leaves one out."""
    config = json.loads((FIXTURES / variant / "config.json").read_text()) | fields
    config = {name: value for name, value in config.items() if value is not ...}
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors(variant), directory / "model.safetensors")
    return directory
