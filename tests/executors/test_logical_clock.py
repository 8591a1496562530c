"""Logical time by hand, and that a simulator which errs by one step is found out."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve import EngineConfig
from jaxserve.core import StepPlan, empty_plan
from jaxserve.executors.cost_model import LinearCost, LogicalClock
from jaxserve.executors.sim_executor import SimExecutor, Truth
from tests import serving
from tests.engine.harness import SCHEDULES, SIM_C, Served, config, serve, truths

SHAPE = EngineConfig(
    max_model_len=64,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    block_size=4,
    num_blocks=16,
    num_scheduler_steps=4,
).shape(16)
# Primes of a millisecond, so that no sum is right by accident.
COST = LinearCost(fixed_s=0.101, token_s=0.0103, context_token_s=0.00107)


def plan(
    decode: list[tuple[int, int]], chunks: dict[int, tuple[int, int]] | None = None
) -> StepPlan:
    """Decode rows (slot, steps), then chunks by slot: (tokens, end), of 4 steps."""
    made = empty_plan(SHAPE, 4, 16)
    rows = [*decode, *((slot, 4) for slot in chunks or {})]
    if rows:
        made.decode[: len(rows)] = rows
    at = 0
    for row, (slot, (count, end)) in enumerate((chunks or {}).items(), len(decode)):
        made.chunk_end[row] = end
        for position in range(end - count, end):
            made.chunk[at] = (slot, position, 1)
            at += 1
    return made


def ran(*steps_by_row: int) -> np.ndarray:
    """bool[N, R]: how many steps each row ran."""
    out = np.zeros((4, 4), bool)
    for row, steps in enumerate(steps_by_row):
        out[:steps, row] = True
    return out


def test_each_executed_step_costs_its_tokens_rows_and_context() -> None:
    clock = LogicalClock(SHAPE, COST)
    f, t, c = COST.fixed_s, COST.token_s, COST.context_token_s
    # Slot 2: a prompt of 5 tokens, then 3 more steps over 6, 7 and 8 KV rows.
    free = clock.finish(plan([], {2: (5, 5)}), ran(4), 0.0)
    expected = (f + 5 * t) + (f + t + 6 * c) + (f + t + 7 * c) + (f + t + 8 * c)
    assert clock.now() == pytest.approx(expected)
    assert free == 16 - 2
    # Beside it slot 0 starts a prompt of 10, 7 now. Slot 2 runs 2 of its 4 steps.
    free = clock.finish(plan([(2, 4)], {0: (7, 7)}), ran(2), 0.0)
    expected += (f + 8 * t + 9 * c) + (f + 2 * t + 10 * c)  # 2 rows are listed
    assert clock.now() == pytest.approx(expected)
    assert free == 16 - 3 - 2
    # Slot 0's last 3, sampled once; slot 2 is listed and has stopped.
    free = clock.finish(plan([(2, 4)], {0: (3, 10)}), ran(0, 1), 0.0)
    expected += f + 4 * t
    assert clock.now() == pytest.approx(expected)
    assert free == 16 - 3 - 3
    # Nobody runs, and the step is run all the same.
    clock.finish(plan([(2, 4)]), ran(0), 0.0)
    expected += f + t
    assert clock.now() == pytest.approx(expected)
    # A launch that only edits blocks takes no time.
    edits = empty_plan(SHAPE, 4, 0)
    edits.release[:2] = [0, 2]
    assert clock.finish(edits, ran(), 0.0) == 16
    assert clock.now() == pytest.approx(expected)


def test_a_launch_starts_when_submitted_or_when_the_last_has_finished() -> None:
    clock = LogicalClock(SHAPE, SIM_C)
    clock.finish(plan([], {0: (5, 5)}), ran(1), 0.0)  # 15 ms
    clock.finish(plan([(0, 1)]), ran(1), 0.0)  # submitted long before: 15 + 11
    assert clock.now() == pytest.approx(0.026)
    clock.sleep_until(1.0)
    clock.sleep_until(0.5)  # time never runs back
    assert clock.now() == 1.0
    clock.finish(plan([(0, 1)]), ran(1), 1.0)
    assert clock.now() == pytest.approx(1.011)
    clock.sleep_until(2.0)
    clock.finish(plan([(0, 1)]), ran(1), 1.011)  # submitted before the sleep
    assert clock.now() == 2.0
    clock.finish(plan([(0, 1)]), ran(1), 2.0)
    assert clock.now() == pytest.approx(2.011)


@pytest.mark.parametrize("simulated", [False, True])
def test_token_times_with_launches_in_flight(simulated: bool) -> None:
    """Two in flight: what is planned ahead starts when the one before has finished."""
    executor = None
    if simulated:
        truth = {i: Truth([5] * 8, stops=False) for i in range(2)}

        def executor(model, params, shape):
            return SimExecutor(shape, truth, SIM_C)

    served = Served(config(4, 2, 2, num_blocks=16), executor=executor)
    served.add("a", [1] * 6, 5)
    served.add("b", [2] * 3, 2, arrival_time=0.020)
    served.finish()
    # Launch 0: a's prompt and a step, 16 + 11 = 27. Launch 1, planned at 0: two steps
    # of a, to 49. Launch 2, planned at 27 when launch 0 is read: a's last step beside
    # b's prompt of 3, 14, and b's second token; both rows are listed: 12. To 75.
    a, b = served.outputs["a"].metrics, served.outputs["b"].metrics
    assert a.token_times_s == pytest.approx([0.027] * 2 + [0.049] * 2 + [0.075])
    assert b.token_times_s == pytest.approx([0.075] * 2)
    assert b.arrival_s == 0.020 and b.admitted_s == pytest.approx(0.027)
    times = [e.time_s for e in served.events]
    assert times == sorted(times)


def test_a_simulation_gives_the_outputs_it_was_told() -> None:
    truth = {0: Truth([9, 8, 7], stops=True), 1: Truth([1, 2, 3, 4], stops=False)}
    served = Served(
        config(4, 2, 4, num_blocks=16),
        executor=lambda model, params, shape: SimExecutor(shape, truth, SIM_C),
    )
    served.add("stops", [1], 9)
    served.add("ends", [2], 4)
    served.finish()
    assert served.tokens("stops") == [9, 8, 7] and served.reason("stops") == "stop"
    assert served.tokens("ends") == [1, 2, 3, 4] and served.reason("ends") == "length"


# A simulator that is wrong by one step ------------------------------------------------


class LateSim(SimExecutor):
    """Notices a stop one step late: the stopped row runs once more in its window."""

    def submit(self, plan, who, moves):
        ticket = super().submit(plan, who, moves)
        out = ticket.output
        late = out.ran.copy()
        for row in np.flatnonzero(out.done):
            steps = int(out.ran[:, row].sum())
            if steps < plan.decode[row, 1]:
                late[steps, row] = True
        return ticket._replace(output=out._replace(ran=late))


class LateDone(SimExecutor):
    """Tells of a stop with the token after it, which a device never makes."""

    def __init__(self, shape, truth, cost):
        late = {i: Truth([*t.tokens, 0], True) for i, t in truth.items() if t.stops}
        super().__init__(shape, {**truth, **late}, cost)


class LateClock(SimExecutor):
    """Counts one step more than has run."""

    def result(self, ticket):
        output = super().result(ticket)
        if ticket.plan.tokens:
            self.sleep_until(self.now() + 0.01)
        return output


EOS = tuple(range(0, 97, 13))  # a stop about every twelfth token


def runs(make, launches: int, steps: int):
    """The definition's run and a simulator's, of the same jobs."""
    jobs = serving.workload(3, 20, spread_s=0.2)
    known = truths(jobs, EOS)
    assert sum(t.stops for t in known.values()) > 5
    made = config(4, launches, steps, num_blocks=14, max_num_seqs=4)

    def executor(model, params, shape):
        return make(shape, known, SIM_C)

    return [
        serve(Served(made, eos=EOS, executor=which), jobs) for which in (None, executor)
    ]


def equal(real, simulated) -> dict[str, bool]:
    """The parts of the comparison: plans, outputs, and events but for host_s."""
    fields = ("tokens", "ran", "done", "num_free")
    pairs = zip(real.recorder.outputs, simulated.recorder.outputs, strict=False)
    events = [
        [(e.kind, e.time_s, e.request_id, {**e.data, "host_s": 0}) for e in run.events]
        for run in (real, simulated)
    ]
    return {
        "plans": serving.same_plans(real.recorder.plans, simulated.recorder.plans),
        "outputs": all(
            np.array_equal(getattr(a, name), getattr(b, name))
            for a, b in pairs
            for name in fields
        ),
        "events": events[0] == events[1],
    }


@pytest.mark.parametrize(("launches", "steps"), SCHEDULES)
def test_an_honest_simulator_is_equal_in_everything(launches: int, steps: int) -> None:
    assert all(equal(*runs(SimExecutor, launches, steps)).values())


@pytest.mark.parametrize("launches", [1, 2])
def test_a_simulator_that_ends_one_step_late_is_found(launches: int) -> None:
    """Each way of being late fails a part of the same-plans test (contract 2)."""
    late = equal(*runs(LateSim, launches, 4))
    assert not late["outputs"]
    late = equal(*runs(LateDone, launches, 1))
    assert not late["plans"] and not late["outputs"] and not late["events"]
    late = equal(*runs(LateClock, launches, 1))
    assert not late["events"]


def test_a_simulator_that_miscounts_blocks_stops_the_engine() -> None:
    class Leaks(SimExecutor):
        def result(self, ticket):
            output = super().result(ticket)
            return output._replace(num_free=output.num_free - 1)

    with pytest.raises(RuntimeError, match=r"num_free=\d+ blocks, but free = P -"):
        runs(Leaks, 1, 1)
