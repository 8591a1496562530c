"""The script's values against numbers worked out here, and that a miss is a failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from experiments import seed_exact
from experiments.seed_exact import Check


def holds(group: Callable[[], Iterator[Check]], values: list[float]) -> None:
    """The group gives these values, as expected and as measured, in order."""
    checks = list(group())
    assert [c.measured for c in checks] == pytest.approx(values, rel=1e-6)
    assert [c.expected for c in checks] == pytest.approx(values, rel=1e-6)
    assert all(c.holds for c in checks)


def test_kv_sizes() -> None:
    # 2 * layers * KV heads * 128 * 2 bytes = 512 * layers * KV heads.
    holds(
        seed_exact.kv_sizes,
        [
            512 * 32 * 32,  # Llama-2-7B
            512 * 40 * 40,  # Llama-2-13B
            512 * 80 * 64,  # 70B, a KV head for each query head
            512 * 80 * 8,  # 70B as it is
            512 * 32 * 8,  # Llama-3-8B
        ],
    )
    assert [c.measured for c in seed_exact.kv_sizes()] == [
        524_288,
        819_200,
        2_621_440,
        327_680,
        131_072,
    ]


def test_scheduling_every_n_steps() -> None:
    holds(
        seed_exact.n_step_scheduling,
        [
            100 * 0.5 / 15,
            100 * 0.5 / (5 * 15),
            100 * 1 / 10,
            # The last token is the first of 5: 4 steps of 15 ms are left.
            60,
            # Ends after 4, 3, 2, 1 and 0 more steps, equally often: 2 steps.
            30,
            # Just missed a plan: all 5 steps go by.
            75,
            # 496 = 99 * 5 + 1 tokens: 99 launches, and the whole of another.
            100 * 5 * 15,
            100 * 60 / 7500,
        ],
    )


def test_static_or_continuous() -> None:
    # Static: all end with the longest, after 1,000 steps of 10 ms.
    static = [10_000.0] * 5
    # Continuous: each after its own. The mean: (8 * 1,000 + 2 * 10,000) / 10.
    continuous = [1_000.0, 1_000.0, 10_000.0, 10_000.0, 2_800.0]
    holds(seed_exact.static_or_continuous, static + continuous)


def test_tail_padding() -> None:
    # 10 slots for 500 steps, in which 9 * 50 + 500 tokens are made.
    holds(seed_exact.tail_padding, [10 * 500, 100 * 950 / 5000])


def test_a_prefill_stalls_decoders() -> None:
    # Alone, 2,000 tokens * 0.25 ms = 500 ms: 10 decoders are 500 ms late each, and a
    # gap is that and the 10 ms of its own step. In steps of 512 tokens the 10 decoders
    # take 10, so the prompt 502 + 502 + 502 + 494: steps of 128, 128, 128 and 126 ms.
    # These 510 ms bring 4 tokens that would have come in 40.
    holds(seed_exact.prefill_stall, [5.0, 510.0, 10 * (0.510 - 0.040), 128.0])


def test_prefix_reuse() -> None:
    # 10 blocks of 16 tokens; the second prompt computes 200 - 160 tokens, after the
    # 200 of the first.
    holds(seed_exact.prefix_reuse, [160, 240])


def test_shortest_first() -> None:
    # FCFS ends at 10, 12 and 13 s: 10/10, 12/2, 13/1. SJF at 1, 3 and 13: 1/1, 3/2,
    # 13/10.
    holds(
        seed_exact.shortest_first,
        [1, 6, 13, 20 / 3, 1.3, 1.5, 1, 3.8 / 3],
    )
    measured = [c.measured for c in seed_exact.shortest_first()]
    assert [round(measured[i], 2) for i in (3, 7)] == [6.67, 1.27]


def test_the_script_prints_every_value(capsys: pytest.CaptureFixture[str]) -> None:
    seed_exact.main(["seed_exact"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + sum(len(list(group())) for group in seed_exact.CHECKS)
    assert not any("DIFFERS" in line for line in lines)


def test_a_value_that_differs_fails_the_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here the engine plans each step, and 5 tokens of a launch are 1."""
    run = seed_exact.run

    def every_step(*args, **fields):
        return run(*args, **{**fields, "num_scheduler_steps": 1})

    monkeypatch.setattr(seed_exact, "run", every_step)
    with pytest.raises(SystemExit, match="0.5 ms every 5 of them"):
        seed_exact.main(["seed_exact"])
    assert "DIFFERS" in capsys.readouterr().out


@pytest.mark.parametrize("off", [-2e-6, 2e-6])
def test_a_check_allows_for_rounding_alone(off: float) -> None:
    assert Check("", 60.0, 60.0 * (1 + off / 4)).holds
    assert not Check("", 60.0, 60.0 * (1 + off)).holds
