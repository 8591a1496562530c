"""Weights on other devices and on meshes: the same tokens, no program after warm-up."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SERVES = """
import sys
import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxserve import Engine, EngineConfig
from jaxserve.models.hash_model import HashModel
from tests.engine.harness import by_priority
from tests.serving import direct, greedy

mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType[sys.argv[1]],))
model = HashModel()
params = jax.device_put(
    model.init_params(), NamedSharding(mesh, PartitionSpec())
)
config = EngineConfig(
    max_model_len=64,
    max_num_seqs=3,
    max_num_batched_tokens=8,
    block_size=4,
    num_blocks=17,
    num_swap_blocks=30,
    preemption_mode="swap",
    max_logprobs=2,
)
engine = Engine(model, params, config, by_priority())


def serve():
    prompts = {f"{i}": [i + 1] * (5 + i) for i in range(12)}
    told = {}
    for i, (name, prompt) in enumerate(prompts.items()):
        extra = {"logit_bias": {1: 0.0}} if i % 2 else {}
        sampling = greedy(18, logprobs=2, **extra)
        engine.add_request(name, prompt, sampling, priority=3 - i % 3)
        told |= {output.request_id: output for output in engine.step()}
    while engine.has_unfinished_requests():
        told |= {output.request_id: output for output in engine.step()}
    engine.settle_tiers()
    for name, prompt in prompts.items():
        assert told[name].outputs[0].token_ids == direct(prompt, 18)


engine.executor.warmup(iter, transfers=True)
before = engine.stats()["compiles"]
serve()
engine.release_kv()
engine.restore_kv()
serve()
engine.restore(engine.snapshot())
serve()
engine.update_params(params)
serve()
assert engine.stats()["preemptions_by_swap"] > 0
print(jax.device_count(), engine.stats()["compiles"] - before)
"""


def run(script: str, devices: int, *args: str) -> list[str]:
    """What a script prints with so many devices."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    ran = subprocess.run(
        [sys.executable, "-c", script, *args],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_on_two_devices_nothing_compiles_after_warm_up(axis_type: str) -> None:
    assert run(SERVES, 2, axis_type) == ["2", "0"]


MOVES = """
import itertools
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxserve import Engine
from jaxserve.models.hash_model import HashModel
from tests.engine.harness import JAX
from tests.serving import direct, greedy

model = HashModel()
one, two, *_ = devices = jax.devices()


def on_mesh(*devices):
    mesh = Mesh(np.array(devices), ("x",))
    return jax.device_put(model.init_params(), NamedSharding(mesh, PartitionSpec()))


kinds = {
    "anywhere": model.init_params(),
    "one": jax.device_put(model.init_params(), one),
    "two": jax.device_put(model.init_params(), two),
    "a mesh": on_mesh(*devices[:2]),
    "another": on_mesh(*devices[2:]),
}


def finish(engine):
    told = []
    while engine.has_unfinished_requests():
        told += engine.step()
    return told[-1].outputs[0].token_ids


def serve(engine):
    engine.add_request("r", range(1, 10), greedy(5))
    assert finish(engine) == direct(range(1, 10), 5)


for first, then in itertools.product(kinds, kinds):
    engine = Engine(model, kinds[first], JAX)
    serve(engine)
    engine.add_request("running", range(1, 10), greedy(9))
    engine.step()
    engine.update_params(kinds[then], "recompute")
    assert finish(engine) == direct(range(1, 10), 9), (first, then)
    serve(engine)
print(len(devices))
"""


def test_weights_may_move_to_other_devices() -> None:
    assert run(MOVES, 4) == ["4"]
