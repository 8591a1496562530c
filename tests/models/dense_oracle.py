"""A llama in numpy, float64, one sequence at a time: the oracle of log-probabilities.

Written from the papers, for the plain layout of the parameters (models/weights.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def llama_logprobs(config, params, tokens: Sequence[int]) -> np.ndarray:
    """f64[T, V]: log-probabilities of what follows each token."""
    c = config
    (rope,) = (kind.rope for kind in c.attention)
    x = _f64(params["embed"])[list(tokens)]
    angles = np.arange(len(x))[:, None] * np.asarray(rope.frequencies)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def norm(x: np.ndarray, scale) -> np.ndarray:
        mean = np.mean(x * x, axis=-1, keepdims=True)
        return x / np.sqrt(mean + c.norm_epsilon) * _f64(scale)

    def turned(x: np.ndarray) -> np.ndarray:
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    layers = params["layers"]
    for i in range(c.num_layers):
        w = {name: _f64(stack[i]) for name, stack in layers.items()}
        qkv = norm(x, w["attention_norm"]) @ w["qkv"]
        qkv = qkv.reshape(len(x), -1, c.head_dim)
        q, k, v = np.split(qkv, [c.num_heads, c.num_heads + c.num_kv_heads], axis=1)
        q, k = turned(q), turned(k)
        group = c.num_heads // c.num_kv_heads
        heads = []
        for h in range(c.num_heads):
            scores = q[:, h] @ k[:, h // group].T / np.sqrt(c.head_dim)
            scores[np.triu_indices(len(x), 1)] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            heads.append(weights @ v[:, h // group])
        x = x + np.concatenate(heads, axis=1) @ w["output"]
        gate, up = np.split(norm(x, w["mlp_norm"]) @ w["gate_up"], 2, axis=1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w["down"]
    head = params["embed"] if c.tied else params["head"]
    logits = norm(x, params["norm"]) @ _f64(head).T
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def _f64(array) -> np.ndarray:
    return np.asarray(array, np.float64)
