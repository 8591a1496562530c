"""How much of the KV memory holds tokens: reserved to the longest, or in pages.

Reserving gives each request room for max_model_len tokens when it starts: a block as
large as that. Paging gives it a block at a time, so that it wastes half a block on
average. The same lengths are served from the same memory at every block size, in
simulation; more of them at once means fewer steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from absl import app, flags
from tqdm import tqdm

from experiments import common
from experiments.pictures import COLORS, save
from jaxserve import Engine, EngineConfig, SamplingParams
from jaxserve.executors.cost_model import get_profile
from jaxserve.executors.sim_executor import SimExecutor, Truth
from jaxserve.scheduling.policies import fcfs
from jaxserve.simulation import VOCAB_SIZE, NoModel
from jaxserve.workloads import make_workload, token_ids

_N = flags.DEFINE_integer("n", 400, "Of each run, all at once.")
_KV_TOKENS = flags.DEFINE_integer("kv_tokens", 32768, "Rows of KV memory.")
_LONGEST = flags.DEFINE_integer("longest", 4096, "max_model_len; a power of two.")
_SIZES = flags.DEFINE_multi_integer("sizes", [1, 8, 16, 32, 64, 256], "Block sizes.")
_PROFILE = flags.DEFINE_string("profile", "a100-8b", "Cost of a simulated step.")
_OUT_DIR = flags.DEFINE_string(
    "out_dir", "results", "Folder for JSON lines and the picture."
)


def run(block_size: int) -> dict[str, Any]:
    """Serve the workload from blocks of a size; means are over time, by launches."""
    workload = make_workload("W1", n=_N.value, seed=common.seed())
    config = EngineConfig(
        max_model_len=_LONGEST.value,
        max_num_seqs=256,
        block_size=block_size,
        num_blocks=_KV_TOKENS.value // block_size,
        enable_prefix_caching=False,
        preemption_mode="recompute",
    )
    truth: dict[int, Truth] = {}
    engine = Engine(
        NoModel(),
        None,
        config,
        fcfs(),
        executor=lambda model, params, shape: SimExecutor(
            shape, truth, get_profile(_PROFILE.value)
        ),
    )
    tokens = token_ids(workload, vocab_size=VOCAB_SIZE, seed=common.seed())
    outputs = 0
    for i, (_, (prompt, output)) in enumerate(zip(workload, tokens, strict=True)):
        truth[i] = Truth(output.tolist(), stops=True)
        outputs += len(output)
        params = SamplingParams(max_tokens=None, output_kind="final_only")
        engine.add_request(str(i), prompt, params, arrival_time=0.0)
    used, running, wasted, seen = 0.0, 0.0, 0.0, 0
    while engine.has_unfinished_requests():
        engine.step()
        stats = engine.stats()
        if stats["waiting"] == 0:
            continue  # the last ones need no memory that others want
        allocated = 1 - stats["free_blocks"] / stats["num_blocks"]
        used += allocated * (1 - stats["fragmentation"])
        wasted += stats["fragmentation"]
        running += stats["running"]
        seen += 1
    reserved = block_size == _LONGEST.value
    return {
        "memory": "reserved" if reserved else f"blocks of {block_size}",
        "block_size": block_size,
        "running": running / seen,
        "utilisation": used / seen,
        "fragmentation": wasted / seen,
        "preemptions": engine.stats()["preemptions"],
        "output_tokens_s": outputs / engine.now(),
    }


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """What memory holds, and what that does to throughput."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    names = [str(row["memory"]).replace("blocks of ", "") for row in rows]
    panels = (("utilisation", "share of KV rows that hold a token"),) + (
        ("output_tokens_s", "output tokens a second"),
    )
    for i, (axis, (field, label)) in enumerate(zip(axes, panels, strict=True)):
        axis.bar(names, [row[field] for row in rows], color=COLORS[i + 1])
        axis.set(ylabel=label, xlabel="block size")
        axis.tick_params(axis="x", rotation=30)
        axis.grid(axis="y", alpha=0.3)
    save(figure, path)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    sizes = [*_SIZES.value, _LONGEST.value]
    rows = [run(size) for size in tqdm(sizes, disable=None, desc="Block sizes")]
    out = Path(_OUT_DIR.value)
    common.write_json_lines(out / "kv_utilisation.jsonl", rows)
    print(common.table([common.rounded(row) for row in rows]))
    draw(rows, out / "kv_utilisation.png")
    print(out / "kv_utilisation.png")


if __name__ == "__main__":
    app.run(main)
