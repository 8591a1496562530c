"""Small random llamas: every parameter noise, so that nothing left out goes unseen.

Owns the tiny models that make_fixtures.py writes: safetensors, GGUF, and the logits at
every position. The references compare a whole pass with one token at a time.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": [2, 5],
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@torch.no_grad()
def write_tiny(tied: bool, out: Path) -> None:
    config = LlamaConfig(**TINY, tie_word_embeddings=tied, attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    rng = np.random.default_rng(1 if tied else 0)
    for name, parameter in model.named_parameters():
        # Initial norms of one and zero biases would hide a norm that is not applied.
        noise = rng.standard_normal(parameter.shape)
        scale, centre = (0.3, 1.0) if "norm" in name else (0.15, 0.0)
        parameter.copy_(torch.from_numpy(centre + scale * noise))
    shutil.rmtree(out, ignore_errors=True)
    size = "500MB" if tied else "200KB"
    model.generation_config.eos_token_id = [2, 7]
    model.save_pretrained(out, max_shard_size=size)
    shards = list(out.glob("*.safetensors"))
    assert len(shards) == (1 if tied else 2), shards
    write_tiny_gguf(model, out / "model.gguf")

    prompts = [rng.integers(0, 256, length).tolist() for length in (1, 7, 33, 100)]
    logits = []
    for ids in prompts:
        whole = model(torch.tensor([ids])).logits[0].numpy()
        cache, steps = None, []
        for token in ids:
            step = model(torch.tensor([[token]]), cache=cache, use_cache=True)
            cache = step.cache
            steps.append(step.logits[0, 0].numpy())
        difference = np.abs(np.stack(steps) - whole).max()
        assert difference < 2e-5, difference
        logits.append(whole)
    print(out.name, "logits spread", np.concatenate(logits).std())
    np.savez_compressed(
        out / "logits.npz",
        prompt_ids=np.concatenate(prompts).astype(np.int32),
        prompt_lengths=np.array([len(ids) for ids in prompts], np.int32),
        logits=np.concatenate(logits),  # f32[sum of lengths, 256]
    )


def write_tiny_gguf(model, path: Path) -> None:
    """As llama.cpp's converter does: q and k rows re-ordered, rope factors a tensor."""
    c = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_vocab_size(c.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, c.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        data = tensor.numpy()
        heads = {
            "q_proj.weight": c.num_attention_heads,
            "k_proj.weight": c.num_key_value_heads,
        }.get(".".join(name.split(".")[-2:]))
        if heads is not None:
            rows, columns = data.shape
            halves = data.reshape(heads, 2, rows // heads // 2, columns)
            data = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), data)
    writer.add_tensor("rope_freqs.weight", rope_factors(c))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rope_factors(c) -> np.ndarray:
    rope = c.rope_parameters
    context = rope["original_max_position_embeddings"]
    longest = context / rope["low_freq_factor"]
    shortest = context / rope["high_freq_factor"]
    factors = []
    for pair in range(c.head_dim // 2):
        wave = 2 * math.pi * rope["rope_theta"] ** (2 * pair / c.head_dim)
        if wave < shortest:
            factors.append(1.0)
        elif wave > longest:
            factors.append(rope["factor"])
        else:
            span = rope["high_freq_factor"] - rope["low_freq_factor"]
            smooth = (context / wave - rope["low_freq_factor"]) / span
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    assert 1.0 in factors and rope["factor"] in factors and len(set(factors)) > 2
    return np.array(factors, np.float32)
