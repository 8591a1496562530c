"""Prompt log-probabilities are transformers', whatever the schedule.

The references are `logits.npz` beside a tiny model (tools/make_fixtures.py).
"""

from __future__ import annotations

import functools
import pathlib

import numpy as np
import pytest

from jaxserve import Engine, EngineConfig, RequestOutput, SamplingParams
from jaxserve.models import load

TINY = pathlib.Path(__file__).resolve().parents[1] / "fixtures" / "tiny_llama"
TOP = 3
SCHEDULES = {
    "chunks": {"max_chunk_tokens": 7, "num_scheduler_steps": 4},
    # Memory for the longest request and little else.
    "tight": {
        "num_blocks": 16,
        "launches_in_flight": 2,
        "preemption_mode": "swap",
        "num_swap_blocks": 20,
    },
}


@functools.cache
def model():
    return load(TINY, "float32")


@functools.cache
def reference() -> list[tuple[list[int], np.ndarray]]:
    """Prompt ids, and log-probabilities f64[n, V] of what follows each."""
    with np.load(TINY / "logits.npz") as saved:
        ids, logits = saved["prompt_ids"], saved["logits"].astype(np.float64)
        logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        ends = np.cumsum(saved["prompt_lengths"])
    spans = zip([0, *ends], ends, strict=False)
    return [(ids[a:b].tolist(), logs[a:b]) for a, b in spans]


def check(output: RequestOutput, ids: list[int], logs: np.ndarray) -> None:
    assert output.prompt_logprobs is not None and output.num_cached_tokens == 0
    first, *rows = output.prompt_logprobs
    assert first is None and len(rows) == len(ids) - 1
    for row, token, expected in zip(rows, ids[1:], logs, strict=False):
        assert row is not None and TOP <= len(row) <= TOP + 1
        for one, entry in row.items():
            assert entry.logprob == pytest.approx(expected[one], abs=1e-4)
        best = np.sort(expected)[::-1][:TOP]
        told = sorted((e.logprob for e in row.values()), reverse=True)[:TOP]
        np.testing.assert_allclose(told, best, atol=1e-4)
        above = int((expected > expected[token] + 1e-4).sum())
        ties = int((np.abs(expected - expected[token]) <= 1e-4).sum())
        assert above < row[token].rank <= above + ties


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_prompt_token_has_transformers_logprob(schedule: str) -> None:
    decoder, params, _ = model()
    prompts = reference() * 2
    longest = max(len(ids) for ids, _ in prompts)
    config = EngineConfig(
        **{
            "max_model_len": longest + 32,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 32,
            "block_size": 8,
            "num_blocks": 200,
            "max_logprobs": TOP,
            **SCHEDULES[schedule],
        }
    )
    engine = Engine(decoder, params, config)
    for round_ in range(2):  # the second time all prompts are cached
        for i, (ids, _) in enumerate(prompts):
            asked = None if i % 3 == 2 else TOP
            sampling = SamplingParams(
                temperature=0.0,
                max_tokens=16,
                ignore_eos=True,
                prompt_logprobs=asked,
            )
            engine.add_request(f"{i}", ids, sampling, arrival_time=0.0)
        done = {}
        while engine.has_unfinished_requests():
            done |= {output.request_id: output for output in engine.step()}
        for i, (ids, logs) in enumerate(prompts):
            if i % 3 == 2:
                assert done[f"{i}"].prompt_logprobs is None
            else:
                check(done[f"{i}"], ids, logs)
        found = engine.stats()["prefix_hits_tokens"]
        assert found > 0 or round_ == 0 or schedule == "tight"
    assert (engine.stats()["preemptions"] > 0) == (schedule == "tight")
    assert engine.holds_nothing()
    engine.close()
