"""The scripts about KV memory run as a user runs them; small, and by hand."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from tests.experiments.test_batching_scripts import run


def lines(path: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_an_edit_recomputes_the_blocks_from_its_own_on(tmp_path: pathlib.Path) -> None:
    table = run("prefix_reuse", "--simulate", f"--out_dir={tmp_path}")
    told = lines(tmp_path / "prefix_reuse_simulated.jsonl")
    assert (tmp_path / "prefix_reuse_simulated.png").stat().st_size > 10_000
    warm = [row for row in told if row["caching"]]
    assert all(row["cached"] == 0 for row in told if not row["caching"])
    by = {row["scenario"]: row["cached"] for row in warm}
    assert {k: v for k, v in by.items() if k.startswith("edit")} == {
        "edit at 0": 0,
        "edit at 100": 96,
        "edit at 255": 240,
        "edit at 256": 256,
        "edit at 400": 400,
        "edit at 511": 496,
    }
    system = [row["cached"] for row in warm if row["scenario"] == "system prompt"]
    assert system == [0] + [384] * 9
    # 24 tokens, then 40 and an answer of 48 a turn; KV of all but the last token.
    turns = [row for row in warm if row["scenario"] == "conversation"]
    assert [row["prompt"] for row in turns] == [64 + 88 * i for i in range(8)]
    assert [row["cached"] for row in turns[1:]] == [
        (64 + 88 * i + 47) // 16 * 16 for i in range(7)
    ]
    # 4,160 prompt tokens, 3,456 of them found; 80 of output.
    (row,) = [line for line in table.splitlines() if "system prompt" in line]
    share = (704 * 3 + 3456 * 0.3 + 80 * 15) / (4160 * 3 + 80 * 15)
    assert float(row.split()[-1]) == pytest.approx(share, rel=0.01)


def test_pages_hold_more_than_reservations(tmp_path: pathlib.Path) -> None:
    run("kv_utilisation", "--n=300", "--sizes=1", "--sizes=16", f"--out_dir={tmp_path}")
    single, paged, reserved = lines(tmp_path / "kv_utilisation.jsonl")
    assert single["fragmentation"] == 0
    assert 0 < paged["fragmentation"] < 0.1  # under half a block of hundreds of tokens
    assert reserved["running"] == pytest.approx(32768 / 4096, rel=0.01)
    assert reserved["utilisation"] < 0.2 < 0.7 < paged["utilisation"]
    assert reserved["output_tokens_s"] < paged["output_tokens_s"]


def test_ways_to_preempt_are_swept_over_the_link(tmp_path: pathlib.Path) -> None:
    flags = ["--n=150", "--rps=6", "--gbps=1", "--gbps=64", f"--out_dir={tmp_path}"]
    table = run("preemption_modes", *flags)
    rows = lines(tmp_path / "preemption_modes.jsonl")
    assert "S * kappa = 5.12 GB/s" in table and "190,735 tokens/s" in table
    assert (tmp_path / "preemption_modes.png").stat().st_size > 10_000
    tight = {
        (row["mode"], row["gbps"]): row
        for row in rows
        if row["model"].startswith("13B")
    }
    assert tight["recompute", 1]["preemptions"] > 0
    for gbps in (1, 64):
        assert tight["swap", gbps]["recomputed_tokens"] == 0
        assert tight["swap", gbps]["swapped"] == tight["swap", gbps]["preemptions"]
    fast = tight["auto", 64]
    assert fast["swapped"] > 0.9 * fast["preemptions"]


@pytest.mark.slow
def test_a_restart_answers_from_disk(tmp_path: pathlib.Path) -> None:
    flags = ["--lengths=256", "--prompts=2", f"--out_dir={tmp_path}"]
    run("disk_tier", *flags)
    (row,) = lines(tmp_path / "disk_tier.jsonl")
    assert row["cached"] == 240  # 15 whole blocks before the last token
    # 576 B a token and layer in bfloat16, 30 layers, or twice that in float32.
    block = 16 * 30 * 2 * 3 * 64 * 2
    assert row["loaded_mb"] == pytest.approx(2 * 15 * block / 1e6, rel=0.01) or (
        row["loaded_mb"] == pytest.approx(2 * 15 * 2 * block / 1e6, rel=0.01)
    )
