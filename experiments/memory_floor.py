"""What memory alone allows: output tokens a second if decoding only read its bytes.

A decode step reads every weight once, the KV that all running requests share once, and
the other KV of each. Prompts, arithmetic and everything else cost nothing here, so no
engine that computes every token by itself can be faster.
"""

from __future__ import annotations

import math
import os
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from experiments.bench_workloads import Workload
from jaxserve.models.base import Model, Params


def bandwidth_bytes_s() -> float:
    """Bytes a second that all cores together read from memory; the best of 20 tries."""
    values = np.ones(1 << 26)  # 512 MB: more than any cache holds
    cores = os.cpu_count() or 1
    parts = np.array_split(values, 4 * cores)
    best = math.inf
    with ThreadPoolExecutor(cores) as pool:
        for _ in range(20):
            start_s = time.perf_counter()
            list(pool.map(lambda part: float(np.dot(part, part)), parts))
            best = min(best, time.perf_counter() - start_s)
    return values.nbytes / best


def decode_bytes(workload: Workload, weight_bytes: int, kv_token_bytes: int) -> int:
    """Bytes that decoding reads when all requests run at once from the start.

    Args:
      weight_bytes: read once a step. kv_token_bytes: of one position, all layers.
    """
    shared = len(os.path.commonprefix(workload.prompts))
    shared = shared if len(workload.prompts) > 1 else 0
    steps = max(workload.output_tokens)
    own = sum(
        # Step i reads the prompt and i outputs; what all share is counted aside.
        outputs * (len(prompt) - shared) + outputs * (outputs - 1) // 2
        for prompt, outputs in zip(
            workload.prompts, workload.output_tokens, strict=True
        )
    )
    return steps * weight_bytes + (steps * shared + own) * kv_token_bytes


def sizes(model: Model, params: Params) -> tuple[int, int]:
    """(bytes of all weights, KV bytes of one position in all layers)."""
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    pages = model.page_shapes(1, 1)
    kv = sum(math.prod(p.shape) * p.dtype.itemsize for p in pages.values())
    return weights, kv
