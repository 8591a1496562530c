"""What launches added up to: steps, tokens, padding and the host's time.

Owns the totals that `Engine.stats` and launch events report. Never sees a block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.config import EngineShape
from jaxserve.core import StepOutput
from jaxserve.scheduling.running import Launch, Row


@dataclasses.dataclass
class Accounts:
    """Totals since the engine was made.

    Attributes:
      launches: submitted. steps: run. padded_tokens: positions computed for nobody.
      prefill_tokens: prompt tokens computed, again after a preemption included.
      output_tokens: tokens kept. host_s: seconds spent planning and observing.
    """

    launches: int = 0
    steps: int = 0
    padded_tokens: int = 0
    prefill_tokens: int = 0
    output_tokens: int = 0
    host_s: float = 0.0

    def repeat(self, work: Mapping[str, Any], launches: int, host_s: float) -> None:
        """Add equal launches of decodes, `work` and host_s each."""
        self.launches += launches
        self.steps += launches * work["steps"]
        self.padded_tokens += launches * work["padded_tokens"]
        self.host_s += launches * host_s

    def record(
        self, launch: Launch, output: StepOutput, host_s: float
    ) -> dict[str, Any]:
        """Add a launch that was read; what it did, in the terms of its event."""
        plan, rows = launch.plan, launch.rows
        ran = output.ran.sum(axis=1)  # rows that ran in each step
        further = int((ran[1:] > 0).sum())
        prefill = sum(row.prompt_tokens for row in rows)
        # A row of no tokens at all is a finished request of a static batch: padding.
        decode = sum(not row.prompt_tokens and row.steps > 0 for row in rows)
        padded = plan.tokens - prefill - decode
        padded += further * plan.rows - int(ran[1:].sum())
        steps = further + (plan.tokens > 0)
        self.steps += steps
        self.padded_tokens += padded
        self.prefill_tokens += prefill
        self.host_s += host_s
        sampled = output.ran.sum(axis=0).tolist()  # by row
        return {
            "row_bucket": plan.rows,
            "token_bucket": plan.tokens,
            "prefill_tokens": prefill,
            "decode_rows": decode,
            "decode_tokens": int(ran.sum()),
            "padded_tokens": padded,
            "steps": steps,
            "slots": [
                [row.running.slot, row.prompt_tokens, n]
                for row, n in zip(rows, sampled, strict=False)
            ],
        }


def decode_work(shape: EngineShape, rows: Sequence[Row]) -> dict[str, Any]:
    """What a launch of decode rows does that all run as they may, as in `record`."""
    row_bucket, token_bucket = shape.launch_shape(len(rows), len(rows))
    active, steps = sum(row.steps > 0 for row in rows), shape.decode_steps
    padded = token_bucket - active + (steps - 1) * (row_bucket - active)
    return {
        "row_bucket": row_bucket,
        "token_bucket": token_bucket,
        "prefill_tokens": 0,
        "decode_rows": active,
        "decode_tokens": active * steps,
        "padded_tokens": padded,
        "steps": steps,
        "slots": [[row.running.slot, 0, row.steps] for row in rows],
    }
