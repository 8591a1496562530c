"""What experiment scripts share: the flags of a model and its engine, and their output.

Owns flags and the forms of a result (JSON lines, tables). Never sees a launch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags, logging

from jaxserve import LLM
from jaxserve.core import Event
from jaxserve.llm import runs_bfloat16
from jaxserve.models import smollm2_path

_MODEL = flags.DEFINE_string(
    "model", None, "Directory, .gguf file or hub name; default SmolLM2-135M-Instruct."
)
_DTYPE = flags.DEFINE_enum(
    "dtype", None, ["bfloat16", "float32"], "Of weights and cache; default the faster."
)
_MAX_MODEL_LEN = flags.DEFINE_integer("max_model_len", 1024, "Most tokens a request.")
MAX_NUM_SEQS = flags.DEFINE_integer("max_num_seqs", 64, "Requests running at once.")
_BATCHED_TOKENS = flags.DEFINE_integer(
    "max_num_batched_tokens", 512, "Token budget of a step."
)
BLOCK_SIZE = flags.DEFINE_integer("block_size", 16, "Tokens of a KV block.")
NUM_BLOCKS = flags.DEFINE_integer("num_blocks", None, "KV blocks; default by memory.")
_CACHING = flags.DEFINE_bool("enable_prefix_caching", True, "Share equal prefixes.")
_STEPS = flags.DEFINE_integer("num_scheduler_steps", 1, "Decode steps a launch.")
_LAUNCHES = flags.DEFINE_integer("launches_in_flight", 1, "Launches before a read.")
_PREEMPTION = flags.DEFINE_enum(
    "preemption_mode",
    "auto",
    ["recompute", "swap", "disk", "auto", "article"],
    "What becomes of the KV of a request that loses its slot.",
)
_SWAP_BYTES = flags.DEFINE_integer("swap_space_bytes", 0, "Host memory for KV blocks.")
_POLICY = flags.DEFINE_string("scheduling_policy", "fcfs", "Who comes first.")
_SEED = flags.DEFINE_integer("seed", 0, "Of workloads and random streams.")


def seed() -> int:
    """The --seed."""
    return _SEED.value


def make_llm(*, on_event: Callable[[Event], None] | None = None, **changes: Any) -> LLM:
    """The model and engine that the flags ask for, warmed up.

    Args:
      on_event: as in `LLM`.
      changes: arguments of `LLM` that go before the flags.
    """
    logging.set_verbosity(logging.WARNING)  # JAX tells which backends it tried
    options: dict[str, Any] = {
        "dtype": _DTYPE.value or ("bfloat16" if runs_bfloat16() else "float32"),
        "max_model_len": _MAX_MODEL_LEN.value,
        "max_num_seqs": MAX_NUM_SEQS.value,
        "max_num_batched_tokens": _BATCHED_TOKENS.value,
        "block_size": BLOCK_SIZE.value,
        "num_blocks": NUM_BLOCKS.value,
        "enable_prefix_caching": _CACHING.value,
        "num_scheduler_steps": _STEPS.value,
        "launches_in_flight": _LAUNCHES.value,
        "preemption_mode": _PREEMPTION.value,
        "swap_space_bytes": _SWAP_BYTES.value,
        "scheduling_policy": _POLICY.value,
        "seed": _SEED.value,
        "warmup": True,
        "on_event": on_event,
    }
    return LLM(_MODEL.value or smollm2_path(), **(options | changes))


def rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with its floats to 4 significant digits."""
    return {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}


def write_json_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write one JSON object a line, making the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of equal keys as text columns; floats to 3 digits, None as a dash."""

    def show(value: Any) -> str:
        if value is None:
            return "-"
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    head = list(rows[0]) if rows else []
    cells = [head, *([show(row[key]) for key in head] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    )
