"""A plan is one i32 vector on its way to the device."""

from __future__ import annotations

import jax
import numpy as np

from jaxserve.core import StepPlan, empty_plan, pack, unpack
from tests.engine.harness import JAX


def test_a_plan_survives_packing_on_the_host_and_in_a_jit() -> None:
    shape = JAX.shape(64)
    rng = np.random.default_rng(0)
    for rows, tokens in shape.launch_shapes():
        plan = StepPlan(
            *(
                rng.integers(-(2**31), 2**31, field.shape, np.int64).astype(np.int32)
                for field in empty_plan(shape, rows, tokens)
            )
        )
        packed = pack(plan)
        assert packed.dtype == np.int32 and packed.ndim == 1
        jitted = jax.jit(unpack, static_argnums=(1, 2, 3))
        for got in (
            unpack(packed, shape, rows, tokens),
            jitted(packed, shape, rows, tokens),
        ):
            for one, two in zip(plan, got, strict=True):
                np.testing.assert_array_equal(one, two)


def test_padding_is_the_size_of_the_axis_and_never_negative() -> None:
    shape = JAX.shape(64)
    plan = empty_plan(shape, 9, 16)
    s, m, h = shape.max_slots, shape.max_blocks_per_slot, shape.num_handles
    for edits in (plan.seal, plan.adopt, plan.publish):
        assert (edits == [s, m, h]).all()
    assert (plan.release == s).all() and (plan.retire == h).all()
    assert (plan.admit == s).all() and (plan.decode == [s, 0]).all()
    assert not plan.chunk_end.any()
    again = empty_plan(shape, 9, 16)
    again.seal[0] = 0  # a plan is the caller's own
    assert (empty_plan(shape, 9, 16).seal == [s, m, h]).all()
