"""A restart with KV blocks on disk: what a hit from disk takes against computing again.

For each prompt length an engine computes the prompts and closes; another one on the
same directory answers them with what it finds there, a third without. Files may still
be in the system's page cache, as they are after a restart of the process alone.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags
from tqdm import tqdm

from experiments import common
from jaxserve import LLM, SamplingParams

_LENGTHS = flags.DEFINE_multi_integer("lengths", [128, 256, 512, 960], "Of prompts.")
_PROMPTS = flags.DEFINE_integer("prompts", 4, "Of each length.")
_DIRECTORY = flags.DEFINE_string("directory", None, "For the files; default temporary.")
_OUT_DIR = flags.DEFINE_string("out_dir", "results", "Folder for JSON lines.")

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def serve(llm: LLM, prompts: Sequence[list[int]]) -> list[tuple[float, int, list[int]]]:
    """TTFT, cached tokens and output of each, one at a time."""
    told = []
    for prompt in prompts:
        (output,) = llm.generate([prompt], PARAMS, use_tqdm=False)
        assert output.metrics.ttft_s is not None
        ids = output.outputs[0].token_ids
        told.append((output.metrics.ttft_s, output.num_cached_tokens, ids))
    return told


def compare(length: int, folder: Path) -> dict[str, Any]:
    """Prompts of a length: computed, and found on disk by another engine."""
    rng = np.random.default_rng(common.seed() + length)
    prompts = rng.integers(1000, 49_000, (_PROMPTS.value, length)).tolist()
    options = {"disk_cache_dir": str(folder), "disk_cache_bytes": 2**30}
    with common.make_llm(**options, tier_write="through") as first:
        computed = serve(first, prompts)
        first.engine.settle_tiers()
        saved_blocks = first.stats()["saved_blocks"]
    files = list(folder.rglob("*.kv"))
    start_s = time.perf_counter()
    with common.make_llm(**options) as second:
        ready_s = time.perf_counter() - start_s
        found = serve(second, prompts)
        loaded_blocks = second.stats()["loaded_blocks"]
    for (_, _, one), (_, _, two) in zip(computed, found, strict=True):
        if one != two:
            raise ValueError(f"an answer from disk differs: {one} and {two}")
    size = files[0].stat().st_size
    compute_s = statistics.median(ttft_s for ttft_s, _, _ in computed)
    disk_s = statistics.median(ttft_s for ttft_s, _, _ in found)
    return {
        "prompt_tokens": length,
        "cached": found[0][1],
        "compute_ttft_s": compute_s,
        "disk_ttft_s": disk_s,
        "speedup": compute_s / disk_s,
        "saved_mb": saved_blocks * size / 1e6,
        "loaded_mb": loaded_blocks * size / 1e6,
        "restart_s": ready_s,
    }


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    rows = []
    for length in tqdm(_LENGTHS.value, disable=None, desc="Lengths"):
        with tempfile.TemporaryDirectory(dir=_DIRECTORY.value) as folder:
            rows.append(compare(length, Path(folder)))
    common.write_json_lines(Path(_OUT_DIR.value) / "disk_tier.jsonl", rows)
    print(common.table([common.rounded(row) for row in rows]))


if __name__ == "__main__":
    app.run(main)
