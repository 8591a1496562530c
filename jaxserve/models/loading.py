"""From a path or a name to (model, params, tokenizer), whatever format the files have.

Owns the choice of reader. Never sees a tensor.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jaxserve.models.base import Params
from jaxserve.models.decoder import Decoder
from jaxserve.models.gguf_checkpoint import GGUFFile
from jaxserve.models.gguf_tokenizer import build_tokenizer
from jaxserve.models.hf_checkpoint import SafetensorsSource, read_config
from jaxserve.models.locate import locate
from jaxserve.models.tokenizer import Tokenizer
from jaxserve.models.weights import TensorLayout, load_params


def load(
    path_or_name: str | Path,
    dtype: str = "bfloat16",
    max_model_len: int | None = None,
) -> tuple[Decoder, Params, Tokenizer | None]:
    """Load a checkpoint to the default device.

    Args:
      path_or_name: a Hugging Face directory, a .gguf file, or a name on the hub.
      dtype: "bfloat16" or "float32", of weights and KV pages, whatever the file holds.
      max_model_len: most tokens that a sequence will have. It matters where a
        checkpoint has rotary tables for short and for long contexts (Phi-3's longrope):
        the short one if that many fit in it, else, and for None, the long one.

    Returns:
      The model, whose eos_ids join those of every file; its parameters; its tokenizer,
      or None if the files hold none (prompts are token ids then).

    Raises:
      ValueError: naming the architecture, field or tensor that does not fit.
      FileNotFoundError: naming the file or shard that is missing.
    """
    path = locate(path_or_name)
    if path.is_dir():
        config, layout = read_config(path, dtype, max_model_len)
        source = SafetensorsSource(path)
        has_tokenizer = (path / "tokenizer.json").exists()
        tokenizer = Tokenizer.from_directory(path) if has_tokenizer else None
    else:
        source = GGUFFile(path)
        config, layout = source.config(dtype), TensorLayout()
        has_tokenizer = source.get("tokenizer.ggml.model") is not None
        tokenizer = build_tokenizer(source) if has_tokenizer else None
    if tokenizer is not None:
        eos_ids = tuple(sorted({*config.eos_ids, *tokenizer.eos_ids}))
        config = dataclasses.replace(config, eos_ids=eos_ids)
    decoder = Decoder(config)
    return decoder, decoder.prepare(load_params(config, source, layout)), tokenizer
