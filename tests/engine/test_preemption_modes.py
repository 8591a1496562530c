"""Swap against recompute on the definition: what is chosen, expected and measured.

In logical time a launch and a transfer take what their formulas say, so what a
preemption cost can be worked out by hand.
"""

from __future__ import annotations

import statistics

import pytest

from jaxserve import EngineConfig
from jaxserve.executors.cost_model import LinearCost, get_profile
from jaxserve.executors.link import LinkCost
from jaxserve.scheduling.policies import fcfs
from jaxserve.simulation import simulate
from jaxserve.workloads import make_workload
from tests.engine.harness import Served, by_priority, config, preempt
from tests.serving import direct

FAST = LinkCost(block_s=0.0001, fixed_s=0.0001)
SLOW = LinkCost(block_s=0.1, fixed_s=0.1)
COST = LinearCost(fixed_s=0.010, token_s=0.001)


def served(mode: str, link: LinkCost, **fields) -> Served:
    """One slot; what displaces its request needs no block that has a name."""
    return Served(
        config(
            4,
            1,
            1,
            **{
                "max_num_seqs": 1,
                "num_blocks": 64,
                "num_swap_blocks": 64,
                "preemption_mode": mode,
                "enable_prefix_caching": False,
                **fields,
            },
        ),
        policy=by_priority(),
        link=link,
        cost=COST,
    )


def displace(run: Served, outputs: list[int]) -> list[dict]:
    """Serve "r", displaced at these output counts; the data of its outcomes."""
    run.add("r", range(5, 17), 24)
    for count in outputs:
        run.until(lambda n=count: len(run.tokens("r")) >= n)
        preempt(run)
    run.finish()
    assert run.tokens("r") == direct(range(5, 17), 24)
    return [event.data for event in run.of("resumed", "r")]


def test_a_swap_costs_its_transfers() -> None:
    outcomes = displace(served("swap", SLOW), [2, 6, 10])
    # 12 prompt tokens and 2, 6, 10 outputs are 13, 17, 21 rows: 4, 5, 6 blocks.
    assert [o["mode"] for o in outcomes] == ["swap"] * 3
    for outcome, blocks in zip(outcomes, (4, 5, 6), strict=True):
        assert outcome["actual_s"] == pytest.approx(2 * (0.1 + 0.1 * blocks))
    # Two transfers of different size tell both costs.
    assert outcomes[2]["predicted_s"] == pytest.approx(1.4, rel=0.05)


def test_a_recomputation_costs_its_share_of_launches() -> None:
    outcomes = displace(served("recompute", SLOW), [2, 6, 10])
    assert [o["mode"] for o in outcomes] == ["recompute"] * 3
    # It is alone: the whole launch of 14, 18, 22 tokens but for its fixed 10 ms.
    for outcome, tokens in zip(outcomes, (14, 18, 22), strict=True):
        assert outcome["actual_s"] <= 0.010 + 0.001 * tokens
    assert outcomes[2]["actual_s"] == pytest.approx(0.022, rel=0.3)
    assert outcomes[2]["predicted_s"] == pytest.approx(outcomes[2]["actual_s"], rel=0.3)


@pytest.mark.parametrize(("link", "chosen"), [(FAST, "swap"), (SLOW, "recompute")])
def test_auto_takes_the_cheaper_way(link: LinkCost, chosen: str) -> None:
    outcomes = displace(served("auto", link), [2, 6, 10, 14])
    modes = [outcome["mode"] for outcome in outcomes]
    # Before any transfer was seen it may guess wrong, once.
    assert modes[1:] == [chosen] * 3
    for outcome in outcomes[1:]:
        assert outcome["predicted_s"] < outcome["other_s"]


def test_without_room_on_the_host_every_rule_recomputes() -> None:
    for mode in ("auto", "article", "swap"):
        run = served(mode, FAST, num_swap_blocks=0)
        outcomes = displace(run, [2, 6])
        assert [o["mode"] for o in outcomes] == ["recompute"] * 2


def test_predictions_are_near_once_the_machine_is_known() -> None:
    cost = LinearCost(fixed_s=0.010, token_s=0.001, context_token_s=2e-5)
    run = Served(
        config(
            4,
            2,
            1,
            max_num_seqs=6,
            num_blocks=24,
            num_swap_blocks=40,
            preemption_mode="swap",
            tier_write="never",
        ),
        cost=cost,
        link=LinkCost(block_s=0.002, fixed_s=0.001),
    )
    for i in range(60):
        run.add(str(i), [i % 7] * (6 + i % 11), 20)
    run.finish()
    outcomes = [event.data for event in run.of("resumed")]
    assert len(outcomes) > 20
    # Who found all of it in the cache copied nothing: off by everything.
    errors = [
        abs(o["predicted_s"] - o["actual_s"]) / max(o["actual_s"], 1e-9)
        for o in outcomes[20:]
    ]
    assert statistics.median(errors) <= 0.3


@pytest.mark.parametrize("gbps", [0.003, 0.3, 1.0, 5.0, 20.0])
def test_auto_is_not_slower_than_the_better_way_on_a_cpu(gbps: float) -> None:
    """W5's lengths, all at once, with the costs of SmolLM2. A block in bfloat16 is keys
    and values of 30 layers, 16 tokens and 3 heads of 64. Copies within a CPU's memory
    come to gigabytes a second; at the least bandwidth to compute again is better."""
    link = LinkCost(block_s=2 * 30 * 16 * 3 * 64 * 2 / (gbps * 1e9))
    jobs = tuple(
        job._replace(
            arrival_s=0.0,
            prompt_tokens=min(job.prompt_tokens // 2 + 1, 500),
            output_tokens=min(job.output_tokens, 500),
        )
        for job in make_workload("W3", n=64, seed=1, rate=1.0)
    )
    took = {}
    for mode in ("recompute", "swap", "auto"):
        shape = EngineConfig(
            max_model_len=1024,
            max_num_seqs=32,
            num_blocks=160,
            num_swap_blocks=10_000,
            enable_prefix_caching=False,
            preemption_mode=mode,
        )
        results = simulate(jobs, shape, fcfs(), get_profile("smollm2-cpu"), link=link)
        assert results.stats["preemptions"] > 20
        took[mode] = max(request.finished_s or 0.0 for request in results.requests)
    assert (took["recompute"] < took["swap"]) == (gbps < 0.01)
    assert took["auto"] <= 1.05 * min(took["recompute"], took["swap"])
