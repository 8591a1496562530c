"""The whole device side of an engine as one pytree, donated to every launch.

Owns what a slot is on the device and how its parameters arrive. Never sees a request, a
name or the host's counts.
Axes: S slots, M columns per slot, P blocks, B tokens per block, R rows in a launch,
T tokens of the mixed step, N decode steps, H handles, K edits, E stop ids, L layers.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxserve.config import EngineShape
from jaxserve.core import ADMIT_FIELDS
from jaxserve.device import block_pool, processors
from jaxserve.device.block_pool import BlockPool
from jaxserve.device.processors import Tables
from jaxserve.models.base import Model, Pages

I32, F32 = jnp.int32, jnp.float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """Progress and sampling parameters of every slot.

    Attributes:
      length: KV rows written. The last sampled token is not among them.
      last: the last sampled token, to be fed by the next decode step.
      stopped: a stop id was sampled; the slot writes and grows no more.
      key: the request's 64-bit seed as threefry key data.
      sample_index: which of the request's samples this is.
      temperature, top_k, top_p, min_p: as in `SamplingParams`; temperature 0 = greedy.
      stop_from: sequence length from which a stop id may be drawn (min_tokens).
      wants_logprobs: whether log-probabilities are to be computed.
      processed: whether its logits go through its tables first.
      stop_ids: padded with a negative id.
    """

    length: jax.Array  # i32[S]
    last: jax.Array  # i32[S]
    stopped: jax.Array  # bool[S]
    key: jax.Array  # u32[S, 2]
    sample_index: jax.Array  # i32[S]
    temperature: jax.Array  # f32[S]
    top_k: jax.Array  # i32[S]
    top_p: jax.Array  # f32[S]
    min_p: jax.Array  # f32[S]
    stop_from: jax.Array  # i32[S]
    wants_logprobs: jax.Array  # bool[S]
    processed: jax.Array  # bool[S]
    stop_ids: jax.Array  # i32[S, E]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EngineState:
    """Everything that a launch reads and writes."""

    pool: BlockPool
    pages: Pages
    slots: Slots
    tables: Tables


def init_pages(model: Model, shape: EngineShape) -> Pages:
    """Empty KV pages.

    They are zero: NaN in a row that nobody wrote would survive a masked softmax.
    """
    return {
        name: jnp.zeros(spec.shape, spec.dtype)
        for name, spec in model.page_shapes(shape.num_blocks, shape.block_size).items()
    }


def init(model: Model, shape: EngineShape) -> EngineState:
    """An empty engine: every block free, every slot idle, the pages empty."""
    s = shape.max_slots
    slots = Slots(
        length=jnp.zeros(s, I32),
        last=jnp.zeros(s, I32),
        stopped=jnp.zeros(s, bool),
        key=jnp.zeros((s, 2), jnp.uint32),
        sample_index=jnp.zeros(s, I32),
        temperature=jnp.zeros(s, F32),
        top_k=jnp.zeros(s, I32),
        top_p=jnp.ones(s, F32),
        min_p=jnp.zeros(s, F32),
        stop_from=jnp.zeros(s, I32),
        wants_logprobs=jnp.zeros(s, bool),
        processed=jnp.zeros(s, bool),
        stop_ids=jnp.full((s, shape.max_stop_ids), -1, I32),
    )
    pool = block_pool.init(
        shape.num_blocks, s, shape.max_blocks_per_slot, shape.num_handles
    )
    return EngineState(
        pool=pool,
        pages=init_pages(model, shape),
        slots=slots,
        tables=processors.init(model.vocab_size, shape),
    )


def admit(slots: Slots, rows: jax.Array) -> Slots:
    """Write the parameters of newly taken slots, i32[R, A]; padding: slot = S."""
    column = {name: rows[:, i] for i, name in enumerate(ADMIT_FIELDS)}
    slot = column["slot"]

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[slot].set(new, mode="drop")

    def real(name: str) -> jax.Array:
        return jax.lax.bitcast_convert_type(column[name], F32)

    seed = jnp.stack([column["seed_high"], column["seed_low"]], axis=1)
    return dataclasses.replace(
        slots,
        stopped=put(slots.stopped, jnp.zeros_like(slot, bool)),
        key=put(slots.key, jax.lax.bitcast_convert_type(seed, jnp.uint32)),
        sample_index=put(slots.sample_index, column["sample_index"]),
        temperature=put(slots.temperature, real("temperature")),
        top_k=put(slots.top_k, column["top_k"]),
        top_p=put(slots.top_p, real("top_p")),
        min_p=put(slots.min_p, real("min_p")),
        stop_from=put(slots.stop_from, column["stop_from"]),
        wants_logprobs=put(slots.wants_logprobs, column["wants_logprobs"] > 0),
        processed=put(slots.processed, column["processed"] > 0),
        stop_ids=put(slots.stop_ids, rows[:, len(ADMIT_FIELDS) :]),
    )
