"""The engine's state is one donated value: no launch copies the cache."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import EngineConfig
from jaxserve.core import empty_plan, pack
from jaxserve.device import state as device_state
from jaxserve.device.step import compiled
from jaxserve.models.decoder import Decoder
from jaxserve.models.decoder_config import AttentionKind, DecoderConfig
from jaxserve.models.hash_model import HashModel
from jaxserve.models.rope import Rope
from tests.engine.harness import JAX

CONFIG = EngineConfig(
    max_model_len=64,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    block_size=16,
    max_logprobs=2,
)
DECODER = Decoder(
    DecoderConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        norm_epsilon=1e-5,
        attention=(AttentionKind(Rope(tuple(10_000.0 ** (-i / 8) for i in range(8)))),),
        tied=True,
        context_length=64,
        eos_ids=(),
        dtype="float32",
    )
)


def _params(model: HashModel | Decoder) -> dict:
    """Shapes alone: nothing is run."""
    if isinstance(model, HashModel):
        return jax.eval_shape(model.init_params)
    c = model.config
    d, f, layers = c.hidden_size, c.intermediate_size, c.num_layers
    wide = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    of = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    return {
        "embed": of((c.vocab_size, d)),
        "norm": of((d,)),
        "layers": {
            "attention_norm": of((layers, d)),
            "qkv": of((layers, d, wide)),
            "output": of((layers, c.num_heads * c.head_dim, d)),
            "mlp_norm": of((layers, d)),
            "gate_up": of((layers, d, 2 * f)),
            "down": of((layers, f, d)),
        },
    }


def _memory(model: HashModel | Decoder, num_blocks: int):
    """Compiler's account of a mixed launch, and the bytes of its pages."""
    steps = 1 if isinstance(model, HashModel) else 2
    shape = dataclasses.replace(CONFIG, num_scheduler_steps=steps).shape(num_blocks)
    state = jax.eval_shape(lambda: device_state.init(model, shape))
    rows, tokens = shape.launch_shape(4, 16)
    plan = pack(empty_plan(shape, rows, tokens))
    program = compiled(model, shape).lower(
        _params(model), state, plan, rows=rows, tokens=tokens
    )
    pages = sum(x.size * x.dtype.itemsize for x in state.pages.values())
    return program.compile().memory_analysis(), pages


@pytest.mark.parametrize(
    ("model", "share"),
    [
        # With a loop of decode steps: 327 MB of pages, of which a layer would be half.
        pytest.param(DECODER, 0.01, id="decoder"),
        # A block of 64 bytes: the pool's own vectors of P are a fair part of it.
        pytest.param(HashModel(), 0.5, id="hash model"),
    ],
)
def test_a_launch_needs_no_memory_in_proportion_to_the_cache(
    model: HashModel | Decoder, share: float
) -> None:
    memory, pages = _memory(model, 10_000)
    assert memory.temp_size_in_bytes < share * pages
    # All of the state is an alias of its input: pages, pool and slots.
    assert memory.alias_size_in_bytes >= pages
    fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert fresh < 0.01 * pages  # the outputs of the launch


def test_a_launch_writes_into_the_buffers_it_was_given() -> None:
    model, shape = HashModel(), JAX.shape(64)
    state = device_state.init(model, shape)
    before = {id_: x.unsafe_buffer_pointer() for id_, x in state.pages.items()}
    rows, tokens = shape.launch_shape(1, 0)
    step = compiled(model, shape)
    after, _ = step(
        model.init_params(),
        state,
        pack(empty_plan(shape, rows, tokens)),
        rows=rows,
        tokens=tokens,
    )
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert before == {id_: x.unsafe_buffer_pointer() for id_, x in after.pages.items()}


def test_an_empty_engine_is_finite_and_free() -> None:
    shape = CONFIG.shape(8)
    state = jax.device_get(device_state.init(DECODER, shape))
    assert (state.pages["kv"] == 0).all()  # NaN would survive a masked softmax
    assert state.pool.num_free == 8
    assert sorted(state.pool.free.tolist()) == list(range(8))
    assert (state.pool.table == 8).all() and (state.pool.cache == 8).all()
    assert not state.slots.length.any() and (state.slots.stop_ids < 0).all()


def test_a_launch_of_padding_changes_nothing() -> None:
    """Whatever the state: one that ran, and stopped in the middle of a block."""
    model, shape = HashModel(), JAX.shape(64)
    rng = np.random.default_rng(0)
    state = jax.device_get(device_state.init(model, shape))
    slots = dataclasses.replace(
        state.slots,
        length=rng.integers(1, 48, shape.max_slots, np.int32),
        last=rng.integers(0, 97, shape.max_slots, np.int32),
        temperature=np.ones(shape.max_slots, np.float32),
    )
    pages = {"ids": rng.integers(0, 97, state.pages["ids"].shape, np.int32)}
    state = dataclasses.replace(state, slots=slots, pages=pages)
    for tokens in (0, 16):
        rows, tokens = shape.launch_shape(1, tokens)
        given = jax.device_put(state)
        plan = pack(empty_plan(shape, rows, tokens))
        after, out = compiled(model, shape)(
            model.init_params(), given, plan, rows=rows, tokens=tokens
        )
        for one, two in zip(
            jax.tree.leaves(state), jax.tree.leaves(after), strict=True
        ):
            np.testing.assert_array_equal(one, two)
        assert not out.ran.any() and not out.done.any() and out.num_free == 64
