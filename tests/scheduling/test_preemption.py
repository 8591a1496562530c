"""What a preemption costs, by hand, and rates found from measurements."""

from __future__ import annotations

import random

import numpy as np
import pytest

from jaxserve.scheduling.preemption import (
    Fit,
    Rates,
    Victim,
    prefill_pairs,
    recompute_s,
    swap_s,
    swaps,
)


def test_a_gigabyte_over_the_link_and_two_thousand_tokens_again() -> None:
    # 1 GB at 50 GB/s is 20 ms a way; 2,000 tokens at 4,000 a second are 500 ms.
    rates = Rates(1 / 4000, out_s=0.0, in_s=1e9 / 50e9)
    victim = Victim(2000, 2000, 0, blocks=1)
    assert swap_s(victim, rates) == pytest.approx(0.020)
    assert recompute_s(victim, rates) == pytest.approx(0.500)
    both_ways = rates._replace(out_s=1e9 / 50e9)
    assert swap_s(victim, both_ways) == pytest.approx(0.040)


def test_a_long_answer_to_a_short_prompt() -> None:
    # 2,600 tokens of 0.5 MB at 50 GB/s: 26 ms; at 4,000 tokens a second: 650 ms. The
    # rule of thumb sees 100 tokens to compute, 25 ms, and recomputes.
    victim = Victim(100, 2600, 0, blocks=2600)
    rates = Rates(1 / 4000, out_s=0.5e6 / 50e9, in_s=0.5e6 / 50e9)
    assert victim.blocks * rates.in_s == pytest.approx(0.026)
    assert recompute_s(victim, rates) == pytest.approx(0.650)
    assert swaps("auto", victim, rates)
    assert not swaps("article", victim, rates)
    # With 110 of them in the prompt, 27.5 ms, it agrees.
    assert swaps("article", victim._replace(input_tokens=110), rates)


def test_attention_grows() -> None:
    assert prefill_pairs(0, 4) == 1 + 2 + 3 + 4
    assert prefill_pairs(4, 6) == 5 + 6
    rates = Rates(token_s=0.001, pair_s=0.0001)
    assert recompute_s(Victim(6, 6, 0, 1), rates) == pytest.approx(0.006 + 0.0021)
    assert recompute_s(Victim(6, 6, 4, 1), rates) == pytest.approx(0.002 + 0.0011)


def test_what_makes_a_choice_by_victim() -> None:
    # A block of 16 tokens takes 12 ms to compute and 10 ms to copy, both ways together.
    rates = Rates(0.012 / 16, out_s=0.005, in_s=0.005, transfer_s=0.001)
    short, long = Victim(16, 16, 0, 1), Victim(160, 160, 0, 10)
    assert not swaps("auto", short, rates) and swaps("auto", long, rates)  # fixed costs
    assert not swaps("auto", long, rates, 0.05)  # the link is busy
    # Blocks that stay need no copy, and their tokens no prefill.
    assert not swaps("auto", Victim(160, 160, 144, 1), rates)
    # Attention over a long context costs more than its own tokens.
    steep = rates._replace(pair_s=1e-5)
    assert swaps("auto", Victim(1600, 1600, 1584, 1), steep)


@pytest.mark.parametrize("rates", [Rates(1.0), Rates(0.0, in_s=1.0, out_s=1.0)])
def test_a_fixed_mode_is_no_rule(rates: Rates) -> None:
    victim = Victim(10, 10, 0, 1)
    assert swaps("swap", victim, rates)
    assert not swaps("recompute", victim, rates)


def test_a_fit_finds_what_makes_a_launch_long() -> None:
    truth = np.array([0.012, 2.5e-4, 3e-8, 9e-4, 1.5e-7])
    rng = random.Random(0)
    fit = Fit((5e-3, 2e-4, 1e-7, 2e-4, 1e-7))

    def launch() -> tuple[float, ...]:
        tokens, rows = rng.randint(1, 512), rng.randint(0, 32)
        return 1, tokens, prefill_pairs(0, tokens), rows, rows * rng.randint(50, 800)

    for _ in range(60):
        work = launch()
        fit.observe(work, float(np.dot(truth, work)) * rng.uniform(0.97, 1.03))
    for _ in range(20):
        work = launch()
        assert fit(work) == pytest.approx(float(np.dot(truth, work)), rel=0.05)
    assert fit((0, 100, 0, 0, 0)) == pytest.approx(0.025, rel=0.1)


def test_a_fit_follows_a_machine_that_changes() -> None:
    fit = Fit((1e-4, 1e-4), memory=0.9)
    for n in range(1, 40):
        fit.observe((1, n), 0.001 + 0.002 * n)
    assert fit((1, 10)) == pytest.approx(0.021, rel=0.01)
    for n in range(1, 60):
        fit.observe((1, n), 0.001 + 0.004 * n)
    assert fit((1, 10)) == pytest.approx(0.041, rel=0.02)


def test_one_measurement_outweighs_a_guess() -> None:
    fit = Fit((1e-4, 1e-4))
    fit.observe((1, 8), 0.4)
    assert fit((1, 8)) == pytest.approx(0.4, rel=0.05)
    assert (fit.coefficients >= 0).all()


def test_a_coefficient_is_never_negative() -> None:
    fit = Fit((1e-4, 1e-4))
    for n, seconds in [(1, 0.02), (10, 0.01), (20, 0.005)] * 5:
        fit.observe((1, n), seconds)
    assert (fit.coefficients >= 0).all() and fit((0, 1)) == 0.0
