"""Attention over paged KV in NumPy float64, one query and one head at a time.

Written from the definition alone; shares no code with the package.
"""

from __future__ import annotations

import numpy as np


def paged_attention(
    q: np.ndarray,  # [T, Hq, D]
    pages: np.ndarray,  # [NP, B, Hkv, 2, D]
    table: np.ndarray,  # i32[R, M]
    kv_lens: np.ndarray,  # i32[R]
    cu_q_lens: np.ndarray,  # i32[R + 1]
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> np.ndarray:  # f64[T, Hq, D]; NaN where no rule fixes the value
    """The value of every token that belongs to a row with KV; NaN for the rest."""
    _, query_heads, _ = q.shape
    _, block, kv_heads, _, _ = pages.shape
    out = np.full(q.shape, np.nan)
    for row in range(len(kv_lens)):
        start, stop, kv_len = cu_q_lens[row], cu_q_lens[row + 1], kv_lens[row]
        if kv_len == 0:
            continue
        k, v = _rows(pages, table[row], block, kv_len)
        for token in range(start, stop):
            end = kv_len - (stop - 1 - token)  # the last token sees all
            seen = slice(0 if window is None else max(0, end - window), end)
            for head in range(query_heads):
                kv_head = head * kv_heads // query_heads
                logits = k[seen, kv_head] @ q[token, head].astype(np.float64) * scale
                if soft_cap is not None:
                    logits = soft_cap * np.tanh(logits / soft_cap)
                weights = np.exp(logits - logits.max())
                out[token, head] = weights @ v[seen, kv_head] / weights.sum()
    return out


def _rows(pages, blocks, block, kv_len):
    """K and V of positions 0 .. kv_len - 1, each f64[kv_len, Hkv, D]."""
    at = [(blocks[i // block], i % block) for i in range(kv_len)]
    k = np.stack([pages[p, o, :, 0] for p, o in at]).astype(np.float64)
    v = np.stack([pages[p, o, :, 1] for p, o in at]).astype(np.float64)
    return k, v
