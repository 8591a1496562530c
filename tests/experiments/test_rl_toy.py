"""Learning by rollouts, as a user runs it."""

from __future__ import annotations

import json
import pathlib

import pytest

from tests.experiments.test_batching_scripts import run


@pytest.mark.slow
def test_a_reward_alone_teaches_to_count(tmp_path: pathlib.Path, monkeypatch) -> None:
    """The script itself asserts that no update compiles anything."""
    # optax multiplies integers with floats.
    monkeypatch.setenv("JAX_NUMPY_DTYPE_PROMOTION", "standard")
    run("rl_toy", "--runs=1", "--updates=100", f"--out_dir={tmp_path}")
    text = (tmp_path / "rl_toy.jsonl").read_text(encoding="utf-8")
    rewards = [json.loads(line)["reward"] for line in text.splitlines()]
    assert len(rewards) == 100
    assert sum(rewards[:5]) / 5 < 0.2 and sum(rewards[-10:]) / 10 > 0.9
    assert (tmp_path / "rl_toy.png").stat().st_size > 10_000
