"""The cases of the attention suite: data for a few compiled shapes.

Compiling is what takes the time.
"""

from __future__ import annotations

from tests.kernels.batches import Shape

MIXED = Shape()
DECODE = Shape(tokens=8)
FULL = MIXED.capacity

# name: (shape, query lengths, KV lengths)
CASES = {
    "decode ragged": (DECODE, [1] * 8, [1, 2, 15, 16, 17, 128, 129, FULL]),
    "decode one row": (DECODE, [1], [100]),
    "decode idle rows": (DECODE, [1] * 8, [0, 5, 0, 0, 300, 0, 64, 0]),
    "decode all idle": (DECODE, [1] * 8, [0] * 8),
    "decode full tables": (DECODE, [1] * 8, [FULL] * 8),
    "decode in a mixed shape": (MIXED, [1] * 8, [7, 33, 1, FULL, 16, 0, 31, 255]),
    "one chunk from the start": (MIXED, [64], [64]),
    "one chunk after a prefix": (MIXED, [50], [50 + 77]),
    "one chunk that ends a full table": (MIXED, [64], [FULL]),
    "chunks from the start": (
        MIXED,
        [16, 13, 1, 7, 2, 9, 8, 8],
        [16, 13, 1, 7, 2, 9, 8, 8],
    ),
    "chunks after prefixes": (MIXED, [5, 32, 9, 1], [21, 48, 137, 129]),
    "chunks among empty rows": (MIXED, [0, 31, 0, 0, 20, 0], [0, 95, 0, 0, 20, 0]),
    "chunks without KV": (MIXED, [3, 40, 10], [0, 0, 10]),
    "mixed": (MIXED, [1, 1, 1, 1, 40, 3, 1, 11], [9, 160, 0, 17, 200, 3, 48, 27]),
    "mixed, every token used": (MIXED, [1, 1, 62], [FULL, 1, 190]),
    "nothing": (MIXED, [], []),
}
SHAPES = {
    "GQA 1, D 128, B 8": Shape(block=8, kv_heads=4, groups=1, head_size=128),
    "GQA 4, D 80, B 32": Shape(block=32, columns=9, kv_heads=2, groups=4, head_size=80),
    "GQA 8, D 64, B 16": Shape(kv_heads=1, groups=8),
    "GQA 4, 8 KV heads": Shape(kv_heads=8, groups=4, columns=10, head_size=128),
    "bf16 pages": Shape(kv_dtype="bfloat16"),
    "bf16": Shape(q_dtype="bfloat16", kv_dtype="bfloat16"),
    "bf16 queries": Shape(q_dtype="bfloat16"),
    "bf16, D 128": Shape(
        q_dtype="bfloat16", kv_dtype="bfloat16", kv_heads=2, groups=4, head_size=128
    ),
    "B 256": Shape(block=256, columns=2, kv_heads=2, groups=2, head_size=32),
    "one row": Shape(tokens=3, rows=1, kv_heads=2, groups=1, head_size=32),
    "fewer tokens than rows": Shape(tokens=5, kv_heads=2, groups=2, head_size=32),
    "GQA 7, D 96, B 12": Shape(block=12, kv_heads=2, groups=7, head_size=96),
    "bf16, GQA 5, D 80, B 12": Shape(
        q_dtype="bfloat16",
        kv_dtype="bfloat16",
        block=12,
        kv_heads=2,
        groups=5,
        head_size=80,
    ),
    "MQA 64, D 256, B 3": Shape(
        tokens=20, block=3, columns=50, kv_heads=1, groups=64, head_size=256
    ),
    "many rows": Shape(tokens=70, rows=43, kv_heads=1, groups=2, head_size=32),
    "many tokens": Shape(tokens=600, rows=7, kv_heads=1, groups=2, head_size=32),
}

# name: (shape, query lengths, KV lengths, what is shared)
MANY = Shape(24, rows=24, columns=32, kv_heads=2, groups=2, head_size=32)
SHARED = {
    "by decode rows and chunks": (
        MIXED,
        [1, 1, 1, 20, 20],
        [70, 65, 150, 90, 84],
        [(range(5), slice(4))],
    ),
    "by all": (MANY, [1] * 24, range(300, 420, 5), [(range(24), slice(16))]),
    "by all, with a gap": (
        MANY,
        [1] * 24,
        [400] * 24,
        [(range(24), slice(8)), (range(24), slice(16, 24))],
    ),
    "by all, all of it": (MANY, [1] * 24, [500] * 24, [(range(24), slice(32))]),
    "by groups, in part": (
        MANY,
        [1] * 24,
        [385, 512, 130, 300, 100, 127, 128, 384, 0]
        + [150, 144, 129, 512, 0, 200]
        + [300, 310, 260, 1, 400, 400, 512, 0, 77],
        [
            (range(9), slice(24)),
            (range(9, 15), slice(9)),
            (range(15, 18), slice(16)),
            ([19, 20], slice(32)),
        ],
    ),
    "by rows far apart": (
        MANY,
        [1] * 24,
        range(256, 496, 10),
        [
            (range(0, 24, 3), slice(8)),
            (range(1, 24, 3), slice(16)),
            (range(2, 24, 3), slice(9)),
        ],
    ),
}
