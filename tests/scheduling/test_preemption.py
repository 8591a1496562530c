"""What a preemption costs, by hand, and rates found from measurements."""

from __future__ import annotations

import random

import numpy as np
import pytest

from jaxserve.scheduling.preemption import (
    Fit,
    Queues,
    Rates,
    Victim,
    Way,
    break_even_tokens_s,
    choose,
    costs_s,
    disk_s,
    prefill_pairs,
    recompute_s,
    swap_s,
)

NO_DISK: tuple[Way, ...] = ("recompute", "swap")
NO_HOST: tuple[Way, ...] = ("recompute", "disk")


def test_a_gigabyte_over_the_link_and_two_thousand_tokens_again() -> None:
    # 1 GB at 50 GB/s is 20 ms a way; 2,000 tokens at 4,000 a second are 500 ms.
    rates = Rates(1 / 4000, out_s=0.0, in_s=1e9 / 50e9)
    victim = Victim(2000, 2000, 0, blocks=1)
    assert swap_s(victim, rates) == pytest.approx(0.020)
    assert recompute_s(victim, rates) == pytest.approx(0.500)
    both_ways = rates._replace(out_s=1e9 / 50e9)
    assert swap_s(victim, both_ways) == pytest.approx(0.040)
    assert choose("auto", victim, both_ways, room=NO_DISK) == "swap"
    assert choose("article", victim, both_ways, room=NO_DISK) == "swap"


def test_a_long_answer_to_a_short_prompt() -> None:
    # 2,600 tokens of 0.5 MB at 50 GB/s: 26 ms; at 4,000 tokens a second: 650 ms. The
    # rule of thumb sees 100 tokens to compute, 25 ms, and recomputes.
    victim = Victim(100, 2600, 0, blocks=2600)
    rates = Rates(1 / 4000, out_s=0.5e6 / 50e9, in_s=0.5e6 / 50e9)
    assert swap_s(victim, rates._replace(out_s=0.0)) == pytest.approx(0.026)
    assert recompute_s(victim, rates) == pytest.approx(0.650)
    assert choose("auto", victim, rates, room=NO_DISK) == "swap"
    assert choose("article", victim, rates, room=NO_DISK) == "recompute"
    # With more than 104 of them in the prompt, 26 ms, it agrees.
    for tokens, way in [(103, "recompute"), (105, "swap"), (110, "swap")]:
        prompt = victim._replace(input_tokens=tokens)
        assert choose("article", prompt, rates, room=NO_DISK) == way


@pytest.mark.parametrize(
    ("layers", "kv_heads", "bandwidth", "tokens_s"),
    [
        (32, 8, 25e9, 190_735),  # Llama-3-8B: 131,072 bytes a token
        (40, 40, 25e9, 30_518),  # Llama-2-13B: 819,200
    ],
)
def test_break_even_is_where_a_token_takes_as_long_to_copy_as_to_compute(
    layers: int, kv_heads: int, bandwidth: float, tokens_s: int
) -> None:
    token_bytes = layers * kv_heads * 128 * 2 * 2  # keys and values, two bytes each
    speed = break_even_tokens_s(bandwidth, token_bytes)
    assert round(speed) == tokens_s
    victim = Victim(777, 777, 0, blocks=777)
    for share, way in [(0.99, "swap"), (1.01, "recompute")]:
        rates = Rates(1 / (share * speed), in_s=token_bytes / bandwidth)
        assert choose("auto", victim, rates, room=NO_DISK) == way


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

    def way(victim: Victim, rates: Rates, link_s: float = 0.0) -> Way:
        return choose("auto", victim, rates, Queues(link_s=link_s), NO_DISK)

    assert way(short, rates) == "recompute"  # 12 ms against 10 and twice 1
    assert way(long, rates) == "swap"  # 120 against 102
    assert way(long, rates, 0.017) == "swap"
    assert way(long, rates, 0.019) == "recompute"  # the link is busy
    # Blocks that stay need no copy, and their tokens no prefill.
    assert way(Victim(160, 160, 144, 1), rates) == "recompute"
    # Attention over a long context costs more than its own tokens.
    steep = rates._replace(pair_s=1e-5)
    assert way(Victim(1600, 1600, 1584, 1), steep) == "swap"


# A block to the host and back, 30 ms and 10 of overhead; on to disk and back, 120 and
# 40 more, by hand.
FAR = Rates(
    token_s=0.001,
    out_s=0.010,
    in_s=0.020,
    transfer_s=0.005,
    save_s=0.070,
    load_s=0.050,
    disk_transfer_s=0.020,
)


def test_the_disk_lies_behind_the_host() -> None:
    victim, busy = Victim(400, 400, 0, blocks=2), Queues(link_s=0.5, disk_s=0.25)
    assert swap_s(victim, FAR) == pytest.approx(0.070)
    assert swap_s(victim, FAR, 0.5) == pytest.approx(0.570)
    assert disk_s(victim, FAR) == pytest.approx(0.070 + 0.280)
    assert disk_s(victim, FAR, busy) == pytest.approx(0.570 + 0.280 + 0.25)
    assert costs_s(victim, FAR) == pytest.approx(
        {"recompute": 0.400, "swap": 0.070, "disk": 0.350}
    )
    assert costs_s(victim, FAR, busy) == pytest.approx(
        {"recompute": 0.400, "swap": 0.570, "disk": 1.100}
    )


def test_the_disk_is_chosen_where_the_host_is_full_and_it_is_cheaper() -> None:
    victim = Victim(400, 400, 0, blocks=2)  # 400 ms; host 70, disk 350
    assert choose("auto", victim, FAR) == "swap"
    assert choose("auto", victim, FAR, room=NO_HOST) == "disk"
    assert choose("auto", victim, FAR, Queues(disk_s=0.049), NO_HOST) == "disk"
    assert choose("auto", victim, FAR, Queues(disk_s=0.051), NO_HOST) == "recompute"
    assert choose("auto", victim, FAR, Queues(link_s=0.051), NO_HOST) == "recompute"
    shorter = Victim(349, 349, 0, blocks=2)
    assert choose("auto", shorter, FAR, room=NO_HOST) == "recompute"
    assert choose("auto", victim, FAR, room=["recompute"]) == "recompute"
    # A queue before the disk alone keeps nobody from the host.
    assert choose("auto", victim, FAR, Queues(disk_s=9.0)) == "swap"


@pytest.mark.parametrize("seed", range(5))
def test_auto_takes_the_cheapest_way_for_which_there_is_room(seed: int) -> None:
    rng = random.Random(seed)
    chosen = set()
    for _ in range(300):
        context = rng.randint(1, 4000)
        kept, blocks = rng.randint(0, context - 1), rng.randint(1, 250)
        victim = Victim(rng.randint(1, context), context, kept, blocks)
        rates = Rates(*(rng.uniform(0, 1e-3) for _ in range(8)))
        rates = rates._replace(pair_s=rng.uniform(0, 1e-6))
        queues = Queues(rng.uniform(0, 0.2), rng.uniform(0, 0.2))
        pairs = sum(range(kept + 1, context + 1))
        costs = {"recompute": (context - kept) * rates.token_s + pairs * rates.pair_s}
        host_s = queues.link_s + 2 * rates.transfer_s
        costs["swap"] = host_s + blocks * rates.out_s + blocks * rates.in_s
        disk = blocks * rates.save_s + blocks * rates.load_s + 2 * rates.disk_transfer_s
        costs["disk"] = costs["swap"] + queues.disk_s + disk
        lower: tuple[Way, ...] = ("swap", "disk")
        room: list[Way] = ["recompute", *(w for w in lower if rng.random() < 0.6)]
        way = choose("auto", victim, rates, queues, room)
        assert way in room
        assert costs[way] <= min(costs[other] for other in room) * (1 + 1e-9)
        chosen.add((way, tuple(room)))
    # Each way that there is room for is chosen, but for the disk beside the host.
    assert len(chosen) == 1 + 2 + 2 + 2


@pytest.mark.parametrize("rates", [Rates(1.0), Rates(0.0, in_s=1.0, out_s=1.0)])
def test_a_fixed_mode_is_no_rule(rates: Rates) -> None:
    victim = Victim(10, 10, 0, 1)
    assert choose("swap", victim, rates) == "swap"
    assert choose("disk", victim, rates) == "disk"
    assert choose("recompute", victim, rates) == "recompute"


def test_without_room_a_fixed_mode_falls_back_downwards() -> None:
    victim, rates = Victim(10, 10, 0, 1), Rates(1.0)
    assert choose("swap", victim, rates, room=NO_HOST) == "disk"
    assert choose("swap", victim, rates, room=["recompute"]) == "recompute"
    assert choose("disk", victim, rates, room=NO_DISK) == "recompute"
    assert choose("article", victim, rates, room=NO_HOST) == "disk"
    assert choose("article", victim, rates, room=["recompute"]) == "recompute"
    slow = Rates(0.0, in_s=1.0)  # the article would not swap: nothing goes to disk
    assert choose("article", victim, slow, room=NO_HOST) == "recompute"


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
