"""A simulation that jumps tells the same story as one that plans every launch."""

from __future__ import annotations

import random

import pytest

from jaxserve.executors.cost_model import LinearCost
from jaxserve.executors.sim_executor import SimExecutor
from jaxserve.scheduling.policies import Policy, fcfs
from tests.engine.harness import Served, by_priority, config, serve, truths
from tests.serving import Job, Run

COST = LinearCost(fixed_s=0.0101, token_s=0.00103, context_token_s=0.0000107)


def restless() -> Policy:
    """Fewest output tokens first, and that displaces: every token may change the
    plan."""

    def update(state, events, view_of):
        return state, [e.data["index"] for e in events if e.kind == "progressed"]

    return fcfs()._replace(
        rank=lambda state, view, now_s: (view.output_tokens // 5, (view.arrival_s,)),
        update=update,
    )


def clockwork() -> Policy:
    """Turns the order of arrival around every 0.1 s."""

    def rank(state, view, now_s):
        sign = 1 if int(now_s / 0.1) % 2 else -1
        return sign * view.index % 3, (sign * view.arrival_s,)

    return fcfs()._replace(
        rank=rank, until=lambda state, view, now_s: (int(now_s / 0.1) + 1) * 0.1
    )


def quantum() -> Policy:
    """Two levels: 7 tokens, then the rest."""
    return fcfs()._replace(
        rank=lambda state, view, now_s: (view.output_tokens >= 7, (view.arrival_s,)),
        allow=lambda state, view: (
            7 - view.output_tokens if view.output_tokens < 7 else None
        ),
    )


def run(jobs: list[Job], eos, policy: Policy, *, jump: bool, **fields) -> tuple:
    truth = truths(jobs, eos)
    made: list[SimExecutor] = []

    def executor(model, params, shape):
        made.append(SimExecutor(shape, truth, COST, jump=jump))
        return made[0]

    served = Served(config(4, 1, **fields), policy=policy, eos=eos, executor=executor)
    return serve(served, jobs), served


def story(run: Run) -> list:
    """Events but for the host's own time, and the order of the rows in a launch."""
    told = []
    for e in run.events:
        data = {**e.data, "host_s": 0, "slots": sorted(e.data.get("slots", []))}
        told.append((e.time_s, e.kind, e.request_id or "", data))
    return sorted(told, key=lambda event: event[:3])


@pytest.mark.parametrize("policy", [fcfs, by_priority, restless, clockwork, quantum])
@pytest.mark.parametrize("batching", ["continuous", "static"])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("num_blocks", [24, 200])
def test_a_jumped_run_has_the_same_events(policy, batching, steps, num_blocks) -> None:
    rng = random.Random(num_blocks + steps)
    jobs = [
        Job(
            prompt=[rng.randrange(97) for _ in range(rng.randint(1, 12))],
            max_tokens=rng.randint(1, 50),
            arrival_s=round(rng.random() * 2, 3),
            priority=rng.randrange(3),
        )
        for _ in range(24)
    ]
    fields = {
        "steps": steps,
        "batching": batching,
        "num_blocks": num_blocks,
        "enable_prefix_caching": False,
        "max_num_seqs": 4,
    }
    eos = (7, 50, 3)
    planned, one = run(jobs, eos, policy(), jump=False, **fields)
    jumped, two = run(jobs, eos, policy(), jump=True, **fields)
    assert story(jumped) == story(planned)
    tokens = {name: o.outputs[0].token_ids for name, o in planned.outputs.items()}
    assert tokens == {n: o.outputs[0].token_ids for n, o in jumped.outputs.items()}
    times = {n: o.metrics for n, o in planned.outputs.items()}
    assert times == {n: o.metrics for n, o in jumped.outputs.items()}
    totals = [{**r.engine.stats(), "host_s": 0} for r in (planned, jumped)]
    assert totals[0] == totals[1]
    plans = [len(r.recorder.plans) for r in (planned, jumped)]
    assert plans[1] <= plans[0] == planned.engine.stats()["launches"]
    if policy in (fcfs, by_priority):
        assert plans[1] < plans[0], "no launch was jumped over"


def test_caching_and_launches_in_flight_are_never_jumped_over() -> None:
    jobs = [Job(prompt=[1, 2, 3], max_tokens=30)]
    for fields in ({"enable_prefix_caching": True}, {"launches": 2}):
        fields = {"enable_prefix_caching": False, "steps": 1, "launches": 1} | fields
        launches = fields.pop("launches")
        truth = truths(jobs)
        served = Served(
            config(4, launches, **fields, num_blocks=20),
            executor=lambda m, p, shape, truth=truth: SimExecutor(
                shape, truth, COST, jump=True
            ),
        )
        run = serve(served, jobs)
        assert len(run.recorder.plans) == run.engine.stats()["launches"] >= 30
