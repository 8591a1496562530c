"""The four workloads of the engine benchmark, as token ids; numpy only.

P1: one request. P2: 32 equal ones at once. P3: 64 of mixed lengths. P4: 64 that share a
512-token prefix. The ids are those that the peers' own scripts draw from seed 0, so
that every engine serves the same prompts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

LOW, HIGH = 17, 49000  # past SmolLM2's special tokens, within its vocabulary


class Workload(NamedTuple):
    """Prompts and how many tokens to generate for each, all submitted at once."""

    prompts: list[list[int]]
    output_tokens: list[int]


def make(name: str) -> Workload:
    """P1, P2, P3 or P4."""
    rng = np.random.default_rng(0)

    def ids(n: int) -> list[int]:
        return rng.integers(LOW, HIGH, size=n).tolist()

    if name == "P1":
        return Workload([ids(128)], [128])
    if name == "P2":
        return Workload([ids(128) for _ in range(32)], [128] * 32)
    if name == "P3":
        lengths = rng.integers(16, 513, size=64).tolist()
        outputs = rng.integers(16, 257, size=64).tolist()
        return Workload([ids(n) for n in lengths], outputs)
    if name == "P4":
        prefix = ids(512)
        return Workload([prefix + ids(32) for _ in range(64)], [32] * 64)
    raise ValueError(f"workload {name!r} is unknown; known are P1, P2, P3, P4")
