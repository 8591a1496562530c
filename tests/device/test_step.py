"""One launch: the order of its parts, where it stops, and that it is the definition.

Hand-made plans run on the hash model; what a launch must do to blocks and tokens is
`tests/engine/reference_executor.py`.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jaxserve.config import EngineShape
from jaxserve.core import ADMIT_FIELDS, StepOutput, empty_plan, pack
from jaxserve.device import block_pool
from jaxserve.device import state as device_state
from jaxserve.device.step import compiled
from jaxserve.models.hash_model import HashModel, next_token
from tests import serving
from tests.engine.harness import (
    JAX,
    JAX_4_STEPS,
    SIM_C,
    Served,
    by_priority,
    jax_executor,
    serve,
)
from tests.engine.reference_executor import ReferenceExecutor
from tests.processing import Numbers

B, P = JAX.block_size, JAX.num_blocks
PROMPT = [5, 6, 7, 8, 9]


# Hand-made launches -------------------------------------------------------------------


class Device:
    """A state and what launches do to it."""

    def __init__(self, shape: EngineShape):
        self.shape = shape
        self.model = HashModel()
        self.step = compiled(self.model, shape)
        self.state = device_state.init(self.model, shape)

    def run(self, tokens: int = 8, **fields: list) -> StepOutput:
        """Launch a plan of these entries; `admit` is (slot, stop ids)."""
        plan = empty_plan(self.shape, *self.shape.launch_shape(1, tokens))
        for row, (slot, stops) in enumerate(fields.pop("admit", [])):
            values = dict.fromkeys(ADMIT_FIELDS, 0) | {"slot": slot}
            plan.admit[row] = -1
            plan.admit[row, : len(ADMIT_FIELDS)] = list(values.values())
            at = len(ADMIT_FIELDS)
            plan.admit[row, at : at + len(stops)] = stops
        for name, entries in fields.items():
            if entries:
                getattr(plan, name)[: len(entries)] = entries
        self.state, out = self.step(
            self.model.init_params(),
            self.state,
            pack(plan),
            rows=plan.rows,
            tokens=plan.tokens,
        )
        block_pool.check(self.state.pool)
        return jax.device_get(out)

    @property
    def ids(self) -> np.ndarray:
        """i32[P, B] of the pages."""
        return np.asarray(self.state.pages["ids"])

    def column(self, slot: int, column: int) -> list[int]:
        """Token ids behind a column."""
        return self.ids[int(self.state.pool.table[slot, column])].tolist()


def chunk(slot: int, start: int, tokens: list[int]) -> list[tuple[int, int, int]]:
    return [(slot, start + i, token) for i, token in enumerate(tokens)]


def prefilled(shape: EngineShape, stops: list[int], steps: int = 1):
    """Slot 2 holds PROMPT, its first column named by handle 3; its first launch."""
    device = Device(shape)
    out = device.run(
        admit=[(2, stops)],
        chunk=chunk(2, 0, PROMPT),
        decode=[(2, steps)],
        chunk_end=[5],
        publish=[(2, 0, 3)],
    )
    return device, out


def test_a_handle_sealed_in_a_plan_may_be_retired_in_it() -> None:
    device, out = prefilled(JAX.shape(64), [])
    assert out.tokens[0, 0] == next_token(PROMPT) and out.num_free == P - 2
    device.run(decode=[(2, 1)])
    device.run(decode=[(2, 1)])
    device.run(decode=[(2, 1)])  # 8 rows: the second column is full
    out = device.run(tokens=0, seal=[(2, 1, 9)], release=[2], retire=[9, 3], decode=[])
    assert out.num_free == P
    assert (np.asarray(device.state.pool.cache) == P).all()


def test_a_slot_released_in_a_plan_is_taken_in_it_with_what_it_held() -> None:
    """Release, then adopt, then admit: the successor starts clean, on the same slot."""
    device, _ = prefilled(JAX.shape(64), stops=[next_token(PROMPT)])
    assert bool(device.state.slots.stopped[2])
    out = device.run(
        release=[2],
        adopt=[(2, 0, 3)],
        admit=[(2, [])],
        chunk=chunk(2, 4, [40, 41]),
        decode=[(2, 1)],
        chunk_end=[6],
    )
    assert out.ran[0, 0] and not out.done[0]
    assert out.tokens[0, 0] == next_token([5, 6, 7, 8, 40, 41])
    assert out.num_free == P - 2  # the named block and one of its own
    assert int(device.state.slots.length[2]) == 6


def test_retired_blocks_are_there_for_the_same_plan_to_grow_into() -> None:
    """Release and retire come before grow: with every block used, a plan still fits."""
    device = Device(JAX.shape(P))
    # Fill all 64 blocks: 8 slots of 32 rows, 16 tokens a launch.
    for slot in range(8):
        for start in (0, 16):
            edits = [] if start else [(slot, [])]
            device.run(
                tokens=16,
                admit=edits,
                chunk=chunk(slot, start, list(range(start, start + 16))),
                decode=[(slot, 0)],
                chunk_end=[start + 16],
                publish=[
                    (slot, start // B + i, slot * 8 + start // B + i) for i in range(4)
                ],
            )
    assert int(device.state.pool.num_free) == 0
    out = device.run(
        tokens=16,
        release=[3],
        retire=[3 * 8 + i for i in range(8)],
        admit=[(8, [])],
        chunk=chunk(8, 0, list(range(50, 65))),
        decode=[(8, 1)],
        chunk_end=[15],
    )
    assert out.tokens[0, 0] == next_token(range(50, 65)) and out.num_free == 4


def test_a_prompt_in_the_middle_samples_nothing() -> None:
    device = Device(JAX.shape(64))
    out = device.run(
        admit=[(0, [])], chunk=chunk(0, 0, PROMPT), decode=[(0, 0)], chunk_end=[5]
    )
    assert not out.ran.any() and not out.done.any()
    assert int(device.state.slots.length[0]) == 5
    out = device.run(chunk=chunk(0, 5, [1]), decode=[(0, 1)], chunk_end=[6])
    assert out.tokens[0, 0] == next_token([*PROMPT, 1]) and out.ran[0, 0]


@pytest.mark.parametrize("place", [1, 2, 3])
def test_a_row_done_early_writes_no_kv_and_grows_no_more(place: int) -> None:
    """JX7 (tenstorrent/vllm#123): stopped at its token `place` of 4, with a mate."""
    outputs = serving.direct(PROMPT, 4)
    assert len(set(outputs)) == 4
    shape = JAX_4_STEPS.shape(64)
    device = Device(shape)
    out = device.run(
        tokens=16,
        admit=[(2, [outputs[place - 1]]), (0, [])],
        chunk=chunk(2, 0, PROMPT) + chunk(0, 0, [9]),
        decode=[(2, 4), (0, 4)],
        chunk_end=[5, 1],
    )
    assert out.ran[:, 0].tolist() == [i < place for i in range(4)]
    assert out.tokens[:place, 0].tolist() == outputs[:place]
    assert not out.tokens[place:, 0].any()
    assert out.done[:2].tolist() == [True, False]
    assert out.tokens[:, 1].tolist() == serving.direct([9], 4) and out.ran[:, 1].all()
    rows = 5 + place - 1  # the token that stopped it is not written
    assert int(device.state.slots.length[2]) == rows
    written = [*PROMPT, *outputs[: place - 1]]
    assert device.column(2, 0) == written[:4]
    assert device.column(2, 1) == written[4:] + [0] * (8 - rows)
    held = -(-rows // B) + 1  # and the mate's 4 rows
    assert out.num_free == P - held
    # The next launch lists it, as the host does not know yet: it still does nothing.
    before = device.ids.copy()
    out = device.run(decode=[(2, 4)])
    assert not out.ran.any() and not out.done.any() and out.num_free == P - held
    np.testing.assert_array_equal(device.ids, before)


def test_a_window_ends_with_its_last_row() -> None:
    """JX7 (vllm#27922): each row has its own bound, and the loop ends with the last."""
    device = Device(JAX_4_STEPS.shape(64))
    device.run(
        tokens=16,
        admit=[(0, []), (1, []), (2, [])],
        chunk=chunk(0, 0, [1]) + chunk(1, 0, [2]) + chunk(2, 0, [3]),
        decode=[(0, 1), (1, 1), (2, 1)],
        chunk_end=[1, 1, 1],
    )
    out = device.run(decode=[(0, 2), (1, 0), (2, 3)])
    assert out.ran.sum(axis=0)[:3].tolist() == [2, 0, 3]
    assert not out.ran[3].any()
    assert np.asarray(device.state.slots.length)[:3].tolist() == [3, 1, 4]
    for row, prompt in ((0, [1]), (2, [3])):
        got = out.tokens[:, row][out.ran[:, row]].tolist()
        assert got == serving.direct(prompt, 4)[1 : 1 + len(got)]


# The definition -----------------------------------------------------------------------


@pytest.mark.parametrize("config", [JAX, JAX_4_STEPS], ids=["1 step", "4 steps"])
def test_launches_do_what_the_definition_does(config) -> None:
    """The plans of whole runs, on the device and on the reference, output by output."""
    for seed, (policy, launches) in enumerate([(None, 1), (by_priority(), 3)]):
        jobs = serving.workload(
            seed + 50, 40, aborts=bool(seed), spread_s=0.2, fields=True
        )
        # Requests that end by a stop id, in the middle of a window too.
        stops = [
            dataclasses.replace(job, prompt=[*job.prompt, seed + 1]) for job in jobs[:8]
        ]
        config = dataclasses.replace(config, launches_in_flight=launches)
        runs = []
        for executor in (None, jax_executor()):
            served = Served(
                config, policy=policy, executor=executor, tokenizer=Numbers()
            )
            for i, job in enumerate(stops):
                third = serving.direct(job.prompt, 3)[2]
                served.add(f"stop {i}", job.prompt, 12, stop_token_ids=[third])
            runs.append(serve(served, jobs, resets=[30]))
        definition, device = runs
        assert serving.same_plans(definition.recorder.plans, device.recorder.plans)
        for one, two in zip(
            definition.recorder.outputs, device.recorder.outputs, strict=True
        ):
            np.testing.assert_array_equal(one.tokens, two.tokens)
            np.testing.assert_array_equal(one.ran, two.ran)
            np.testing.assert_array_equal(one.done, two.done)
            assert one.num_free == two.num_free
        block_pool.check(device.recorder.inner.state.pool)
        tables = [slot.columns for slot in definition.recorder.inner.slots]
        held = np.asarray(device.recorder.inner.state.pool.held)
        assert held.tolist() == [len(columns) for columns in tables]


def test_the_definition_notices_broken_guarantees() -> None:
    """What the device trusts the host for, the reference does not."""
    shape = JAX.shape(64)

    def broken(**fields: list) -> str:
        executor = ReferenceExecutor(shape, SIM_C)
        plan = empty_plan(shape, 8, 8)
        plan.admit[0] = -1
        plan.admit[0, : len(ADMIT_FIELDS)] = 0
        plan.chunk[:4] = chunk(0, 0, [1, 2, 3, 4])
        plan.decode[0], plan.chunk_end[0] = (0, 1), 4
        plan.publish[0] = (0, 0, 7)
        executor.submit(plan, [0])
        plan = empty_plan(shape, 8, 8)
        for name, entries in fields.items():
            getattr(plan, name)[: len(entries)] = entries
        with pytest.raises((AssertionError, KeyError)) as error:
            executor.submit(plan, [0] * int((plan.decode[:, 0] < 9).sum()))
        return str(error.value)

    assert "in use is retired" in broken(retire=[7])
    assert "named twice" in broken(seal=[(0, 0, 7)])
    assert "not full" in broken(seal=[(0, 1, 8)])
    assert "used slot" in broken(adopt=[(0, 1, 7)])
    assert "8" in broken(adopt=[(1, 0, 8)])
    assert "out of place" in broken(
        chunk=chunk(0, 5, [1]), decode=[(0, 1)], chunk_end=[5]
    )
    assert "listed twice" in broken(decode=[(0, 1), (0, 1)])
    assert "of no row" in broken(chunk=chunk(0, 4, [1]), decode=[(0, 1)])
