"""Weights that change while requests run: whose they are, and what is never found.

The hash model's weights leave a mark on every KV row, so that a row of others changes
what follows. The oracle applies the model's definition to tokens with their marks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxserve import Engine
from jaxserve.executors.jax_executor import JaxExecutor
from jaxserve.models.hash_model import HashModel, next_token
from jaxserve.outputs import WeightSpan
from tests.engine.harness import (
    EVERY_KIND,
    EXECUTORS,
    JAX,
    JAX_4_STEPS,
    Served,
    config,
    jax_executor,
)
from tests.serving import direct, greedy

MODEL = HashModel()
PROMPT = [5, 6, 7, 8, 9, 10, 11]
MARKS = {0: 0, 1: 40, 2: 3}  # by version


def weights(mark: int):
    """The hash model's, with a mark."""
    return MODEL.init_params(mark)


def continued(
    prompt: list[int], output: list[int], n: int, mark_of: Callable[[int], int]
) -> list[int]:
    """`n` output tokens that begin with `output`; `mark_of` tells the mark of the KV
    row of each position."""
    tokens = [*prompt, *output]
    while len(tokens) < len(prompt) + n:
        tokens.append(next_token([t + mark_of(i) for i, t in enumerate(tokens)]))
    return tokens[len(prompt) :]


def spans(served: Served, name: str) -> list[WeightSpan]:
    """Of a request's output."""
    return served.outputs[name].outputs[0].weight_versions


@pytest.mark.parametrize("mode", ["recompute", "keep"])
@pytest.mark.parametrize(("b", "launches", "steps"), EVERY_KIND)
def test_running_requests_go_on_with_the_new_weights(
    b: int, launches: int, steps: int, mode
) -> None:
    served = Served(config(b, launches, steps, num_blocks=64))
    served.add("r", PROMPT, 20)
    served.add("s", PROMPT[:3], 15)
    served.until(lambda: len(served.tokens("r")) >= 6)
    assert served.engine.update_params(weights(MARKS[1]), mode) == 1
    served.until(lambda: len(served.tokens("r")) >= 12)
    assert served.engine.update_params(weights(MARKS[2]), mode) == 2
    served.finish()
    for name, prompt, n in (("r", PROMPT, 20), ("s", PROMPT[:3], 15)):
        told = spans(served, name)
        assert told[0].version == 0 and len(told) >= 2
        ends = [span.end for span in told]
        assert [span.start for span in told] == [0, *ends[:-1]] and ends[-1] == n
        expected: list[int] = []
        for span in told:
            if mode == "recompute":
                marks = [MARKS[span.version]] * (len(prompt) + n)
            else:
                # The last token sampled is not fed yet: its row is of the next span.
                marks = [0] * (len(prompt) + n)
                for later in told[1:]:
                    start = len(prompt) + later.start - 1
                    marks[start:] = [MARKS[later.version]] * (len(marks) - start)
            expected = continued(prompt, expected, span.end, marks.__getitem__)
        assert served.tokens(name) == expected, name


@pytest.mark.parametrize(
    "executor", ["definition", pytest.param("device", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("launches", [1, 2])
def test_wait_serves_those_with_a_slot_and_nobody_else(
    executor: str, launches: int
) -> None:
    shape = config(4, launches, 4, num_blocks=64, max_model_len=48)
    served = Served(shape, executor=EXECUTORS[executor])  # two slots
    for name in "abcd":
        served.add(name, [ord(name) - 90, *PROMPT], 10)
    served.until(lambda: len(served.tokens("a")) >= 4)
    served.engine.update_params(weights(11), "wait")
    assert served.stats()["running"] == 0 and served.stats()["waiting"] == 2
    served.finish()
    for name in "abcd":
        prompt, version = [ord(name) - 90, *PROMPT], int(name in "cd")
        assert spans(served, name) == [WeightSpan(version, 0, 10)]
        expected = continued(prompt, [], 10, lambda i: 11)
        assert served.tokens(name) == (expected if version else direct(prompt, 10))


@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_pc7_no_cached_block_is_of_other_weights(batching) -> None:
    """PC7 (lmdeploy#4917, vllm#9744): old KV was served after a weight update."""
    served = Served(config(4, 1, 1, num_blocks=64, batching=batching))
    prompt = list(range(1, 10))
    assert served.run("1", prompt, 3).num_cached_tokens == 0
    assert served.run("2", prompt, 3).num_cached_tokens == 8
    served.engine.update_params(weights(5))
    third = served.run("3", prompt, 3)
    assert third.num_cached_tokens == 0
    assert third.outputs[0].token_ids == continued(prompt, [], 3, lambda i: 5)
    assert served.run("4", prompt, 3).num_cached_tokens == 8
    served.engine.update_params(weights(0))  # the first ones again, as a third version
    assert served.run("5", prompt, 3).num_cached_tokens == 0


def test_pc7_logits_are_those_of_a_fresh_engine() -> None:
    """PC7: the third run's logits equal those of an engine with the new weights."""
    new = {"bias": jnp.linspace(0.0, 3.0, 97, dtype=jnp.float32), "mark": jnp.int32(2)}
    logprobs = []
    for fresh in (False, True):
        engine = Engine(MODEL, new if fresh else weights(0), JAX)
        if not fresh:
            _serve(engine, "before", 4)
            engine.update_params(new)
        logprobs.append(_serve(engine, "after", 4).logprobs)
    assert logprobs[0] == logprobs[1]


def _serve(engine: Engine, name: str, n: int):
    engine.add_request(name, list(range(1, 10)), greedy(n, logprobs=3))
    while engine.has_unfinished_requests():
        outputs = engine.step()
    return outputs[0].outputs[0]


@pytest.mark.parametrize("shape", [JAX, JAX_4_STEPS])
def test_new_weights_compile_nothing(shape) -> None:
    served = Served(shape, executor=jax_executor())
    served.run("warm", PROMPT, 8)
    before = served.stats()["compiles"]
    on_host = {"bias": np.zeros(97, np.float32), "mark": np.int32(9)}
    weak = {"bias": jnp.zeros(97), "mark": jnp.asarray(4)}  # of a Python number
    for version, params in enumerate((weights(1), on_host, weak), start=1):
        assert served.engine.update_params(params) == version
        mark = int(params["mark"])
        tokens = served.run(f"{version}", PROMPT, 8).outputs[0].token_ids
        assert tokens == continued(PROMPT, [], 8, lambda i, mark=mark: mark)
    assert served.stats()["compiles"] == before


def sharded(params, axis_type: AxisType):
    """On a mesh of the one device."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(axis_type,))
    return jax.device_put(params, NamedSharding(mesh, PartitionSpec()))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sharded_arrays_are_taken_where_they_are(axis_type: AxisType) -> None:
    engine = Engine(MODEL, sharded(weights(0), axis_type), JAX)
    compiles = []
    for version, mark in enumerate((0, 5, 9)):
        new = sharded(weights(mark), axis_type)
        if version:
            engine.update_params(new)
            taken, given = engine.params["bias"], new["bias"]
            assert taken.unsafe_buffer_pointer() == given.unsafe_buffer_pointer()
            assert taken is given or axis_type == AxisType.Explicit
        told = _serve(engine, f"{version}", 4)
        prompt = list(range(1, 10))
        assert told.token_ids == continued(prompt, [], 4, lambda i, mark=mark: mark)
        compiles.append(engine.stats()["compiles"])
    # The first update forgets cached blocks, by a launch that nothing had needed.
    assert compiles[2] == compiles[1] <= compiles[0] + 1


def test_a_mesh_around_changes_no_program() -> None:
    """Everything that touches the device, with a mesh set and without."""
    shape = dataclasses.replace(JAX, num_blocks=9, num_swap_blocks=20)
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Explicit,))
    first, second = weights(0), jax.tree.map(np.asarray, weights(5))

    def all_of_it(engine: Engine) -> int:
        executor = cast(JaxExecutor, engine.executor)
        executor.warmup(iter, transfers=True)
        told = [_serve(engine, "a", 4).token_ids]
        engine.update_params(second)
        told.append(_serve(engine, "b", 4).token_ids)
        engine.release_kv()
        engine.restore_kv()
        engine.restore(engine.snapshot())
        told.append(_serve(engine, "c", 4).token_ids)
        prompt = list(range(1, 10))
        assert told == [
            continued(prompt, [], 4, lambda i, mark=mark: mark) for mark in (0, 5, 5)
        ]
        return engine.stats()["compiles"]

    all_of_it(Engine(MODEL, first, shape))
    with jax.set_mesh(mesh):
        assert all_of_it(Engine(MODEL, first, shape)) == 0


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"bias": jnp.zeros(96), "mark": jnp.int32(0)}, r"\['bias'\] is float32\[96\]"),
        ({"bias": jnp.zeros(97, jnp.int32), "mark": jnp.int32(0)}, "must be float32"),
        ({"bias": jnp.zeros(97)}, r"\['mark'\] is missing"),
        ({**weights(0), "extra": jnp.zeros(1)}, r"\['extra'\] has no place"),
        ((jnp.zeros(97), jnp.int32(0)), "another structure"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(params, message: str) -> None:
    served = Served(config(4, 1, 1, num_blocks=64))
    served.run("before", PROMPT, 4)
    served.add("r", PROMPT, 9)
    served.step()
    with pytest.raises(ValueError, match=message):
        served.engine.update_params(params)
    served.finish()
    assert served.engine.weight_version == 0
    assert served.tokens("r") == direct(PROMPT, 9)
    assert served.outputs["r"].num_cached_tokens == 4


def test_an_unknown_mode_and_one_that_static_batching_cannot_do() -> None:
    served = Served(config(4, 1, 1, num_blocks=64, batching="static"))
    with pytest.raises(ValueError, match="mode='abort' must be one of"):
        served.engine.update_params(weights(1), "abort")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be 'wait' or 'keep' with"):
        served.engine.update_params(weights(1), "recompute")
    assert served.engine.weight_version == 0


def test_files_of_other_weights_are_never_read(tmp_path: Path) -> None:
    """Both have replaced their weights once: their versions are equal, not the KV."""
    shape = config(
        4,
        1,
        1,
        num_blocks=32,
        tier_write="through",
        num_disk_blocks=40,
        disk_cache_dir=str(tmp_path),
    )
    first, second = (Engine(MODEL, weights(0), shape) for _ in "ab")
    _serve_plain(first)
    first.settle_tiers()
    assert len(list(tmp_path.glob("*/*.kv"))) == 4
    first.update_params(weights(6))
    _serve_plain(first)
    first.settle_tiers()
    # Those of the first weights are gone.
    assert len(list(tmp_path.glob("*/*.kv"))) == 4
    second.update_params(weights(8))
    assert _serve_plain(second) == (0, continued(PROMPT * 2, [], 4, lambda i: 8))
    third = Engine(MODEL, weights(6), shape)
    third.update_params(weights(0))
    assert _serve_plain(third) == (0, direct(PROMPT * 2, 4))
    for engine in (first, second, third):
        engine.close()


def _serve_plain(engine: Engine) -> tuple[int, list[int]]:
    engine.add_request("r", PROMPT * 2, greedy(4))
    while engine.has_unfinished_requests():
        outputs = engine.step()
    return outputs[0].num_cached_tokens, outputs[0].outputs[0].token_ids
