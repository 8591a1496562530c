"""Engines of every kind on the definition: outputs, guarantees, nothing left over.

`ReferenceExecutor` asserts at each launch what the device trusts the host for. Random
configurations, policies, prompts that repeat and continue one another, stops, aborts,
cache resets.
"""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from jaxserve import EngineConfig
from jaxserve.block_count import BlockCount
from jaxserve.core import EVENT_FIELDS
from jaxserve.scheduling.policies import Policy, fcfs
from tests import serving
from tests.engine.harness import (
    Served,
    by_priority,
    equals,
    random_config,
    serve,
    sim_executor,
    truths,
)
from tests.processing import Numbers
from tests.serving import EOS, Job, Run

MODEL_LEN, ROWS = 64, 44  # no prompt and output of these jobs has more KV rows


def fickle() -> Policy:
    """Classes that change with every token, and shrink with time."""
    return fcfs()._replace(
        rank=lambda state, view, now_s: (
            (view.output_tokens // 3 + view.priority) % 3,
            (-view.arrival_s if int(now_s * 40) % 2 else view.arrival_s,),
        ),
        update=lambda state, events, view_of: (state, None),
        until=lambda state, view, now_s: now_s,
        allow=lambda state, view: 3 - view.output_tokens % 3,
    )


def repeated(rng: random.Random, jobs: list[Job]) -> list[Job]:
    """Jobs with the prompts of others, and prompts that continue others' outputs."""
    more = []
    for _ in range(rng.randint(0, 12)):
        job = rng.choice(jobs)
        full = (job.prompt + job.expected())[: ROWS - 8]
        cut = rng.choice([len(full), min(len(job.prompt), len(full)), 4, 8, 16])
        prompt = full[: max(1, cut)]
        more.append(
            dataclasses.replace(
                job,
                prompt=prompt,
                max_tokens=rng.randint(1, ROWS - len(prompt) + 1),
                arrival_s=round(rng.random() / 2, 3),
                abort_after=rng.choice([None, None, None, rng.randrange(60)]),
                priority=rng.randrange(3),
            )
        )
    return jobs + more


@dataclasses.dataclass
class Setting:
    """One random engine and what is asked of it."""

    config: EngineConfig
    policy: Policy
    eos: tuple[int, ...]
    jobs: list[Job]
    resets: list[int]

    @classmethod
    def of(cls, seed: int) -> Setting:
        rng = random.Random(seed)
        size = rng.choice([1, 2, 4, 8])
        tight = -(-rng.choice([ROWS, ROWS, 46, 60, 120]) // size)
        config = random_config(rng, block_size=size, num_blocks=tight)
        jobs = serving.workload(
            seed,
            rng.randint(3, 16),
            spread_s=rng.choice([0.0, 0.3, 1.0]),
            aborts=rng.random() < 0.4,
            kinds=True,
            fields=True,
        )
        few = rng.random() < 0.4  # all of a few prompts, whole blocks often
        return cls(
            config=config,
            policy=rng.choice([fcfs, by_priority, equals, fickle])(),
            eos=rng.choice([(), EOS]),
            jobs=repeated(rng, jobs[:2] * 4 if few else jobs),
            resets=[rng.randrange(100) for _ in range(rng.choice([0, 0, 3, 9]))],
        )

    def run(self, **executor) -> Run:
        served = Served(
            self.config,
            policy=self.policy,
            eos=self.eos,
            tokenizer=Numbers(),
            **executor,
        )
        return serve(served, self.jobs, resets=self.resets)


def check_outputs(setting: Setting, run: Run) -> None:
    for i, job in enumerate(setting.jobs):
        completion = run.outputs[f"{i}"].outputs[0]
        expected = job.expected(setting.eos)
        if completion.finish_reason == "abort":
            expected = expected[: len(completion.token_ids)]
        else:
            stopped = expected[-1] in setting.eos
            assert completion.finish_reason == ("stop" if stopped else "length")
        assert completion.token_ids == expected
        job.check_scores(run.outputs[f"{i}"])


def check_launches(setting: Setting, run: Run) -> None:
    """Budget, chunk cap and the count formula, from the plans and events alone."""
    config, count = setting.config, BlockCount(run.engine.shape)
    outputs = run.recorder.outputs
    moved = run.recorder.moves
    for plan, moves, output in zip(run.recorder.plans, moved, outputs, strict=True):
        assert count.replay(plan, output.ran) == output.num_free
        total = count.equation()
        assert total.endswith(f" = {output.num_free}")
        left = total.removeprefix("free = P - slots - handles = ").rpartition(" = ")[0]
        ceil = left.replace("ceil(", "-(-(").replace("/", ")//")
        assert eval(ceil) == output.num_free  # the equation says what it means
        for order in moves.restore:
            count.resize(order.slot, order.length)
    for event in run.events:
        if event.kind == "launch":
            data = event.data
            assert data["prefill_tokens"] + data["decode_rows"] <= (
                config.max_num_batched_tokens
            )
            cap = config.max_chunk_tokens or config.max_model_len
            assert all(tokens <= cap for _, tokens, _ in data["slots"])
            assert len(data["slots"]) <= config.max_num_seqs


def check_events(setting: Setting, run: Run) -> None:
    """Each request's events are a sentence: arrived, admitted, ..., finished."""
    clock = 0.0
    lives: dict[int, list] = {}
    for event in run.events:
        assert event.time_s >= clock
        clock = event.time_s
        keys = set(EVENT_FIELDS[event.kind])
        if event.kind != "launch":
            keys.add("index")
            lives.setdefault(event.data["index"], []).append(event)
        assert event.data.keys() == keys
    for i in range(len(setting.jobs)):
        events = lives.pop(i)
        kinds = [e.kind for e in events]
        assert kinds[-1] == "finished" and kinds.count("finished") == 1
        finished = events[-1].data
        output = run.outputs[f"{i}"].outputs[0]
        assert finished["output_tokens"] == len(output.token_ids)
        assert finished["output_tokens"] == sum(
            e.data["output_tokens"] for e in events if e.kind == "progressed"
        )
        assert finished["cached_tokens"] == run.outputs[f"{i}"].num_cached_tokens
        assert finished["cached_tokens"] < finished["prompt_tokens"]
        if kinds == ["finished"]:  # aborted before it arrived
            continue
        assert kinds[0] == "arrived"
        slot = None
        first, swapped = True, False
        for e in events[1:-1]:
            if e.kind == "admitted":
                assert slot is None and e.data["first"] == first
                there = e.data["cached_tokens"] + e.data["restored_tokens"]
                if swapped:  # it may have all that it sampled from
                    assert there <= e.data["context_tokens"]
                else:
                    assert there < e.data["context_tokens"]
                slot, first = e.data["slot"], False
            elif e.kind == "preempted":
                assert slot == e.data["slot"]
                slot, swapped = None, e.data["mode"] != "recompute"
    assert not lives


def check_empty(run: Run) -> None:
    """Contract 3: when idle, free = P - live handles; after a reset, free = P."""
    engine = run.engine
    engine.settle_tiers()
    stats = engine.stats()
    assert engine.holds_nothing()
    assert stats["running"] == stats["waiting"] == 0
    assert stats["free_blocks"] == stats["num_blocks"] - stats["cached_blocks"]
    assert stats["idle_cached_blocks"] == stats["cached_blocks"]
    engine.reset_prefix_cache()
    assert engine.stats()["free_blocks"] == stats["num_blocks"]
    assert engine.stats()["host_blocks"] == engine.stats()["disk_blocks"] == 0
    assert len(run.recorder.inner.free) == stats["num_blocks"]
    assert not run.recorder.inner.rows
    assert not run.recorder.inner.host
    assert not run.recorder.inner.disk


def check(seed: int) -> dict[str, int]:
    setting = Setting.of(seed)
    run = setting.run(seed=seed)
    check_outputs(setting, run)
    check_launches(setting, run)
    check_events(setting, run)
    stats = run.engine.stats()
    check_empty(run)
    truth = truths(setting.jobs, setting.eos)
    simulated = setting.run(executor=sim_executor(truth))
    simulated.engine.settle_tiers()
    simulated.engine.reset_prefix_cache()
    assert serving.same_plans(run.recorder.plans, simulated.recorder.plans)
    assert run.recorder.moves == simulated.recorder.moves
    for one, two in zip(run.recorder.outputs, simulated.recorder.outputs, strict=True):
        for field in ("tokens", "ran", "done", "num_free"):
            assert np.array_equal(getattr(one, field), getattr(two, field))
    return stats


@pytest.mark.parametrize("block", range(8))
def test_any_engine_gives_the_outputs_of_the_definition(block: int) -> None:
    seen = [check(seed) for seed in range(10 * block, 10 * block + 10)]
    # The workloads do what they are for.
    for name in ("preemptions", "prefix_hits_tokens", "resumed_hits_tokens"):
        assert sum(stats[name] for stats in seen) > 0, name


@pytest.mark.fuzz
@pytest.mark.parametrize("block", range(50))
def test_many_engines_give_the_outputs_of_the_definition(block: int) -> None:
    for seed in range(10_000 + 50 * block, 10_050 + 50 * block):
        check(seed)
