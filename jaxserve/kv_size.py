"""How many bytes the KV cache takes, from a model's public shape.

Owns the formula. Never sees a model: `Model.page_shapes` says what an engine allocates.
"""

from __future__ import annotations

import numbers


def kv_bytes_per_token(
    num_layers: int, num_kv_heads: int, head_dim: int, dtype_bytes: int = 2
) -> int:
    """Bytes of one token's keys and values: 2 * layers * KV heads * head size * bytes.

    Multi-head attention has a KV head for each query head. Under grouped queries
    (Ainslie et al., "GQA", 2023) a group of query heads shares one; with a single group
    that is multi-query attention. n tokens of a sequence take n times as much, up to
    the rest of its last block.

    Args:
      num_kv_heads: heads that hold keys and values, not query heads.
      head_dim: numbers in one head's key.
      dtype_bytes: 2 for float16 and bfloat16, 4 for float32.

    Raises:
      ValueError: an argument is not an integer >= 1.
    """
    sizes = {
        "num_layers": num_layers,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "dtype_bytes": dtype_bytes,
    }
    total = 2
    for name, size in sizes.items():
        whole = isinstance(size, numbers.Integral) and not isinstance(size, bool)
        if not whole or size < 1:
            raise ValueError(
                f"{name}={size!r} must be an integer >= 1; take it from the model's "
                "config.json"
            )
        total *= int(size)
    return total
