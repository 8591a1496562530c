"""The real executor on the wall clock, and what it promises beside `StepOutput`."""

from __future__ import annotations

import os

import jax
import numpy as np
import pytest

from jaxserve.core import empty_plan
from jaxserve.executors.jax_executor import JaxExecutor
from jaxserve.models.hash_model import HashModel
from tests.engine.harness import JAX, SIM_C, Served, jax_executor
from tests.serving import direct


def test_on_the_wall_clock_nothing_starts_before_it_arrives() -> None:
    served = Served(JAX, executor=jax_executor(None))
    served.run("warm", range(9), 2)
    later = served.engine.now() + 0.05
    served.add("later", range(9), 3, arrival_time=later)
    served.add("now", range(5), 3)
    served.finish()
    assert served.tokens("later") == direct(range(9), 3)
    assert served.tokens("now") == direct(range(5), 3)
    admitted = served.outputs["later"].metrics.admitted_s
    assert admitted is not None and admitted >= later
    times = [e.time_s for e in served.events]
    assert times == sorted(times)
    ends = [e.data["submitted_s"] for e in served.of("launch")]
    assert all(s <= e.time_s for s, e in zip(ends, served.of("launch"), strict=True))


def test_launches_are_read_in_order_however_late() -> None:
    """Three launches are submitted before the first is read."""
    model, shape = HashModel(), JAX.shape(64)
    executor = JaxExecutor(model, model.init_params(), shape, cost=SIM_C)
    plans = []
    for tokens in (3, 2, 1):
        plan = empty_plan(shape, 8, 8)
        plan.chunk[:tokens] = [(tokens, i, 5) for i in range(tokens)]
        plan.decode[0], plan.chunk_end[0] = (tokens, 1), tokens
        plan.admit[0] = -1
        plan.admit[0, 0] = tokens
        plan.admit[0, 1:] = 0
        plans.append(plan)
    # The stop ids of the rows above are all 0, which none of them draws.
    tickets = [executor.submit(plan, [i]) for i, plan in enumerate(plans)]
    outputs = [executor.result(ticket) for ticket in tickets]
    for tokens, output in zip((3, 2, 1), outputs, strict=True):
        assert output.tokens[0, 0] == direct([5] * tokens, 1)[0]
        assert isinstance(output.num_free, int)
        assert isinstance(output.tokens, np.ndarray)
    assert [output.num_free for output in outputs] == [63, 62, 61]
    assert not isinstance(outputs[0].ran, jax.Array)


def test_programs_are_shared_and_counted_from_each_executors_start() -> None:
    first = Served(JAX, executor=jax_executor())
    first.run("r", range(9), 2)
    second = Served(JAX, executor=jax_executor())
    assert second.stats()["compiles"] == 0
    second.run("r", range(9), 2)
    assert second.stats()["compiles"] == 0
    assert sum(e.data["compiles"] for e in second.of("launch")) == 0


def test_a_forked_process_is_told_to_make_its_own_engine(monkeypatch) -> None:
    served = Served(JAX, executor=jax_executor(None))
    served.add("a", range(5), 1)
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    with pytest.raises(RuntimeError, match=f"made in process {parent} .*'spawn'"):
        served.engine.step()
