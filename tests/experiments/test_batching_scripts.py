"""The batching scripts run as a user runs them, on small workloads."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from jaxserve.workloads import make_workload

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(script: str, *flags: str) -> str:
    """What the script prints."""
    done = subprocess.run(
        [sys.executable, "-m", f"experiments.{script}", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_static_batches_use_what_their_longest_leaves(tmp_path: pathlib.Path) -> None:
    n, slots = 40, 4
    flags = [f"--n={n}", f"--slots={slots}", "--seeds=2", f"--out_dir={tmp_path}"]
    table = run("static_vs_continuous", *flags).splitlines()
    lines = (tmp_path / "runs.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert [(r["seed"], r["mode"]) for r in rows] == [
        (0, "static"),
        (0, "continuous"),
        (1, "static"),
        (1, "continuous"),
    ]
    for static, continuous in (rows[:2], rows[2:]):
        jobs = make_workload("W1", n=n, seed=static["seed"])
        steps = 0
        for i in range(0, n, slots):
            batch = jobs[i : i + slots]
            # Prompts in steps of 512 tokens, the last of which gives a first token.
            steps += -(-sum(job.prompt_tokens for job in batch) // 512) - 1
            steps += max(job.output_tokens for job in batch)
        tokens = sum(job.output_tokens for job in jobs)
        assert static["slots used"] == pytest.approx(tokens / (slots * steps), rel=1e-3)
        assert continuous["slots used"] > static["slots used"]
        assert continuous["tok/s"] > static["tok/s"]
    ratios = [rows[i + 1]["tok/s"] / rows[i]["tok/s"] for i in (0, 2)]
    head, line = table[0].split(), table[1].split()
    assert head[-3:] == ["ratio", "low", "high"]
    median, low, high = map(float, line[-3:])
    assert [low, median, high] == pytest.approx(
        [min(ratios), sum(ratios) / 2, max(ratios)], rel=1e-2
    )
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_the_overhead_of_every_point_is_measured() -> None:
    printed = run("scheduling_overhead", "--repeats=2", "--policies=fcfs,sjf:oracle")
    rows = [json.loads(x) for x in printed.splitlines() if x.startswith("{")]
    points = {(r["policy"], r["axis"], r["count"]) for r in rows}
    assert len(points) == len(rows) and {p for p, _, _ in points} == {
        "fcfs",
        "sjf:oracle",
    }
    assert {n for _, axis, n in points if axis == "waiting"} == {0, 10, 100, 1000}
    for axis in ("joins and leaves", "running"):
        assert {n for _, a, n in points if a == axis} == {1, 4, 16, 64, 256}
    assert all(r["launches"] >= 2 for r in rows)
    assert all(0 < r["least_ms"] <= r["median_ms"] <= r["p90_ms"] for r in rows)
