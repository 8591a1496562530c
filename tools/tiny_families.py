"""Tiny models of the decoder's other families: what transformers makes of them.

Owns the configs and references that make_fixtures.py writes to tests/fixtures/families.
Each reference is a whole pass over a prompt and its greedy continuation, compared first
with the same tokens one by one over transformers' own cache.
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from tiny_noise import noise
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": [2, 5],
}
LONGROPE = {
    "hidden_size": 128,
    "original_max_position_embeddings": 32,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [round(1 + 0.03 * i, 2) for i in range(12)],
        "long_factor": [round(1.2 * 1.3**i, 2) for i in range(12)],
    },
}
PROMPTS = (3, 17, 41)
NEW_TOKENS = 12

# name: (model_type, fields, lengths of the prompts)
VARIANTS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "mistral": ("mistral", {"sliding_window": 12}, PROMPTS),
    "qwen2": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 2},
        PROMPTS,
    ),
    "qwen3": (
        "qwen3",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
        PROMPTS,
    ),
    "gemma3": (
        "gemma3_text",
        {
            "sliding_window": 10,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "linear",
                    "rope_theta": 1e6,
                    "factor": 8.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        PROMPTS,
    ),
    "gemma3_soft_caps": (
        "gemma3_text",
        {
            "sliding_window": 10,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 6.0,
        },
        PROMPTS,
    ),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 3}, PROMPTS),
    "phi3": ("phi3", {"sliding_window": 20}, PROMPTS),
    # Within the original context, and beyond it: transformers has a table for each.
    "phi3_longrope_short": ("phi3", LONGROPE, (3, 17)),
    "phi3_longrope_long": ("phi3", LONGROPE, (33, 41)),
}


@torch.no_grad()
def write_family(name: str, out: Path) -> None:
    """config.json, tensors.json and reference.npz of one variant."""
    model_type, fields, lengths = VARIANTS[name]
    config = AutoConfig.for_model(model_type, **{**SIZES, **fields})
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        text = json.loads((Path(saved) / "config.json").read_text())
        with safe_open(Path(saved) / "model.safetensors", "np") as file:
            shapes = {n: list(file.get_slice(n).get_shape()) for n in file.keys()}
    state = {n: torch.from_numpy(noise(n, tuple(s))) for n, s in shapes.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    given = {n for n, _ in model.named_parameters()}
    assert given == set(shapes), given ^ set(shapes)

    # Gemma 3's config has a soft cap of attention that its model leaves to the caller.
    cap = getattr(config, "attn_logit_softcapping", None)
    options = {} if cap is None else {"softcap": cap}
    rng = np.random.RandomState(0)
    prompts = [rng.randint(0, config.vocab_size, n).tolist() for n in lengths]
    tokens, logits = [], []
    for ids in prompts:
        row, whole = continuation(model, ids, options)
        tokens.append(row)
        logits.append(whole)
    every = np.concatenate(logits)
    margins = np.diff(np.sort(every, axis=1)[:, -2:], axis=1)
    print(f"{name:20} spread {every.std():.2f} sure {(margins > 1e-3).mean():.3f}")
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(text, indent=1) + "\n")
    lines = (f"{json.dumps(n)}: {json.dumps(s)}" for n, s in sorted(shapes.items()))
    (out / "tensors.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    np.savez_compressed(
        out / "reference.npz",
        prompt_ids=np.concatenate(prompts).astype(np.int32),
        prompt_lengths=np.array(lengths, np.int32),
        tokens=np.array(tokens, np.int32),  # i32[prompts, 12], greedy
        logits=every,  # f32[sum of (length + 11), 64], after every token but the last
    )


def continuation(
    model, ids: list[int], options: dict[str, Any]
) -> tuple[list[int], np.ndarray]:
    """Greedy tokens, and f32[n, V]: the logits of one pass over all but the last."""
    ids, tokens = list(ids), []
    while len(tokens) < NEW_TOKENS:
        whole = model(torch.tensor([ids]), use_cache=False, **options).logits[0].numpy()
        tokens.append(int(whole[-1].argmax()))
        ids.append(tokens[-1])
    # Where the rope has two tables, its own cache is right within one of them only.
    original = getattr(model.config, "original_max_position_embeddings", math.inf)
    start = 33 if original < len(ids) else 1
    out = model(torch.tensor([ids[:start]]), use_cache=True, **options)
    steps = [out.logits[0].numpy()]
    for token in ids[start:-1]:
        out = model(torch.tensor([[token]]), cache=out.cache, use_cache=True, **options)
        steps.append(out.logits[0].numpy())
    difference = np.abs(np.concatenate(steps) - whole).max()
    assert difference < 5e-5, difference
    return tokens, whole
