"""One launch: block edits, a mixed step of decodes and prompt chunks, more decode
steps.

Owns the order of a launch. Never sees a name, a request or a count: the plan is trusted
(see docs/design.md, "The host guarantees, the device never checks").
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.config import EngineShape
from jaxserve.core import StepPlan, unpack
from jaxserve.device import block_pool, processors, sampling, scoring
from jaxserve.device.state import EngineState, Slots, admit
from jaxserve.models.base import Batch, Model, Params

I32 = jnp.int32


class Outputs(NamedTuple):
    """`core.StepOutput` while it is still on the device; every field set."""

    tokens: jax.Array  # i32[N, R]
    ran: jax.Array  # bool[N, R]
    done: jax.Array  # bool[R]
    num_free: jax.Array  # i32[]
    logprobs: jax.Array  # f32[N, R]
    ranks: jax.Array  # i32[N, R]
    top_ids: jax.Array  # i32[N, R, W]
    top_logprobs: jax.Array  # f32[N, R, W]
    scores: sampling.Logprobs  # of T tokens


def _edit(state: EngineState, plan: StepPlan) -> EngineState:
    """Everything that precedes the mixed step, in the order of `StepPlan`."""
    pool = block_pool.publish(state.pool, plan.seal)
    pool = block_pool.release(pool, plan.release)
    pool = block_pool.retire(pool, plan.retire)
    pool = block_pool.adopt(pool, plan.adopt)
    length = state.slots.length.at[plan.release].set(0, mode="drop")
    slots = admit(dataclasses.replace(state.slots, length=length), plan.admit)
    return dataclasses.replace(state, pool=pool, slots=slots)


def _grow(
    state: EngineState, slot: jax.Array, length: jax.Array, size: int, *, max_new: int
) -> EngineState:
    """Room for `length` KV rows, i32[R], in each slot of i32[R]; padding: S."""
    want = jnp.zeros_like(state.pool.held)
    want = want.at[slot].max((length + size - 1) // size, mode="drop")
    return dataclasses.replace(
        state, pool=block_pool.grow(state.pool, want, max_new=max_new)
    )


def _mixed_batch(
    state: EngineState, plan: StepPlan, live: jax.Array, size: int
) -> Batch:
    """Decode rows first, one token each, then the prompt chunks of the other rows.

    Args:
      live: bool[R], rows that decode a token.
    """
    slots, table = state.slots, state.pool.table
    s, p = table.shape[0], state.pool.refs.shape[0]
    rows, tokens = plan.rows, plan.tokens
    slot, prompt = plan.decode[:, 0], plan.chunk_end > 0
    length = slots.length.at[slot].get(mode="fill", fill_value=0)
    num_decode = ((slot < s) & ~prompt).sum(dtype=I32)
    # Chunk tokens stand in row order from the token axis' num_decode on, as the plan
    # lists them; an adopted prefix shows as a first position above zero.
    chunk_slot, chunk_position, chunk_token = plan.chunk.T
    in_row = chunk_slot[None, :] == slot[:, None]  # [R, T]
    chunk_tokens = jnp.where(prompt, in_row.sum(axis=1, dtype=I32), 0)
    cu = jnp.where(prompt, chunk_tokens, (slot < s).astype(I32))
    cu = jnp.concatenate([jnp.zeros(1, I32), jnp.cumsum(cu, dtype=I32)])
    i = jnp.arange(tokens, dtype=I32)
    decoding = i < num_decode
    row = jnp.minimum(i, rows - 1)
    at = i - num_decode

    def chunk(values: jax.Array, fill: int) -> jax.Array:
        return values.at[jnp.where(at < 0, tokens, at)].get(
            mode="fill", fill_value=fill
        )

    token_slot = jnp.where(
        decoding, jnp.where(live, slot, s)[row], chunk(chunk_slot, s)
    )
    position = jnp.where(decoding, length[row], chunk(chunk_position, 0))
    token = jnp.where(
        decoding,
        slots.last.at[slot].get(mode="fill", fill_value=0)[row],
        chunk(chunk_token, 0),
    )
    return Batch(
        tokens=token,
        positions=jnp.where(token_slot < s, position, 0),
        write_block=table.at[token_slot, position // size].get(
            mode="fill", fill_value=p
        ),
        table=table.at[slot].get(mode="fill", fill_value=p),
        kv_lens=jnp.where(prompt, plan.chunk_end, jnp.where(live, length + 1, 0)),
        cu_q_lens=cu,
        num_decode=num_decode,
        num_tokens=cu[-1],
    )


def _leading(rows: jax.Array) -> jax.Array:
    """i32[]: leading rows that hold all of the rows bool[R]."""
    return jnp.max(jnp.where(rows, 1 + jnp.arange(len(rows), dtype=I32), 0))


def _decode_batch(
    state: EngineState, slot: jax.Array, live: jax.Array, size: int
) -> Batch:
    """One token for each live row; the other rows are idle."""
    slots, table = state.slots, state.pool.table
    s, p = table.shape[0], state.pool.refs.shape[0]
    rows = slot.shape[0]
    mine = jnp.where(live, slot, s)
    length = slots.length.at[mine].get(mode="fill", fill_value=0)
    return Batch(
        tokens=slots.last.at[mine].get(mode="fill", fill_value=0),
        positions=length,
        write_block=table.at[mine, length // size].get(mode="fill", fill_value=p),
        table=table.at[mine].get(mode="fill", fill_value=p),
        kv_lens=jnp.where(live, length + 1, 0),
        cu_q_lens=jnp.arange(rows + 1, dtype=I32),
        num_decode=rows,
        num_tokens=_leading(live),
    )


def _row_params(slots: Slots, slot: jax.Array, position: jax.Array):
    """Sampling parameters of the rows; padding rows are greedy."""

    def of(x: jax.Array, fill: int | float) -> jax.Array:
        return x.at[slot].get(mode="fill", fill_value=fill)

    free = position >= of(slots.stop_from, 0)
    return sampling.RowParams(
        key=of(slots.key, 0),
        sample_index=of(slots.sample_index, 0),
        position=position,
        temperature=of(slots.temperature, 0),
        top_k=of(slots.top_k, 0),
        top_p=of(slots.top_p, 1),
        min_p=of(slots.min_p, 0),
        barred=jnp.where(free[:, None], -1, of(slots.stop_ids, -1)),
        tables=jnp.where(of(slots.processed, False), slot, len(slots.processed)),
    )


def _sample(
    state: EngineState,
    logits: jax.Array,
    slot: jax.Array,
    ran: jax.Array,
    length: jax.Array,
    out: Outputs,
    i: jax.Array | int,
    shape: EngineShape,
) -> tuple[EngineState, Outputs]:
    """Draw row tokens, and record them and the new lengths where `ran` bool[R]."""
    slots, s = state.slots, state.pool.table.shape[0]
    mine = jnp.where(ran, slot, s)
    used = _leading(ran)
    token = sampling.sample(
        logits, state.tables, _row_params(slots, mine, length), used, shape
    )
    wanted = slots.wants_logprobs.at[mine].get(mode="fill", fill_value=False)
    logs = sampling.logprobs(logits, token, wanted, used, width=out.top_ids.shape[-1])
    stops = slots.stop_ids.at[mine].get(mode="fill", fill_value=-1)
    stopped = (stops == token[:, None]).any(axis=1) & ran
    slots = dataclasses.replace(
        slots,
        last=slots.last.at[mine].set(token, mode="drop"),
        stopped=slots.stopped.at[mine].set(stopped, mode="drop"),
    )
    out = out._replace(
        tokens=out.tokens.at[i].set(jnp.where(ran, token, 0)),
        ran=out.ran.at[i].set(ran),
        done=out.done | stopped,
        logprobs=out.logprobs.at[i].set(logs.chosen),
        ranks=out.ranks.at[i].set(logs.rank),
        top_ids=out.top_ids.at[i].set(logs.top_ids),
        top_logprobs=out.top_logprobs.at[i].set(logs.top),
    )
    tables = processors.drawn(state.tables, mine, length, token)
    return dataclasses.replace(state, slots=slots, tables=tables), out


def _set_length(state: EngineState, slot: jax.Array, length: jax.Array) -> EngineState:
    new = state.slots.length.at[slot].set(length, mode="drop")
    return dataclasses.replace(
        state, slots=dataclasses.replace(state.slots, length=new)
    )


def step(
    params: Params,
    state: EngineState,
    packed: jax.Array,
    *,
    model: Model,
    shape: EngineShape,
    rows: int,
    tokens: int,
) -> tuple[EngineState, Outputs]:
    """Run one launch; pure, shapes fixed by (shape, rows, tokens).

    Args:
      params: the model's weights.
      state: donated by `compiled`.
      packed: i32 vector, `core.pack` of a plan of launch shape (rows, tokens).
    """
    plan = unpack(packed, shape, rows, tokens)
    state = _edit(state, plan)
    n, s, size = shape.decode_steps, shape.max_slots, shape.block_size
    width = min(shape.max_logprobs, model.vocab_size)
    out = Outputs(
        tokens=jnp.zeros((n, rows), I32),
        ran=jnp.zeros((n, rows), bool),
        done=jnp.zeros(rows, bool),
        num_free=state.pool.num_free,
        logprobs=jnp.zeros((n, rows), jnp.float32),
        ranks=jnp.zeros((n, rows), I32),
        top_ids=jnp.zeros((n, rows, width), I32),
        top_logprobs=jnp.zeros((n, rows, width), jnp.float32),
        scores=sampling.Logprobs(
            jnp.zeros(tokens, jnp.float32),
            jnp.zeros(tokens, I32),
            jnp.zeros((tokens, width), I32),
            jnp.zeros((tokens, width), jnp.float32),
        ),
    )
    if tokens == 0:
        return state, out
    slot, allowed = plan.decode.T
    prompt = plan.chunk_end > 0
    stopped = state.slots.stopped.at[slot].get(mode="fill", fill_value=True)
    samples = (allowed > 0) & ~stopped
    live = samples & ~prompt
    length = state.slots.length.at[slot].get(mode="fill", fill_value=0)
    length = jnp.where(prompt, plan.chunk_end, length + 1)
    writes = jnp.where(live | prompt, slot, s)
    max_new = min(shape.blocks(tokens) + 1, shape.max_blocks_per_slot)
    state = _grow(state, writes, length, size, max_new=max_new)
    batch = _mixed_batch(state, plan, live, size)
    hidden, pages = model.forward(params, state.pages, batch)
    state = dataclasses.replace(state, pages=pages)
    state = _set_length(state, writes, length)
    logits = partial(model.logits, params, hidden)
    scores = scoring.score(logits, plan, batch.num_decode, out.scores)
    last = jnp.maximum(batch.cu_q_lens[1:] - 1, 0)
    x = logits(last, _leading(samples))
    out = out._replace(scores=scores)
    state, out = _sample(state, x, slot, samples, length, out, 0, shape)
    pool = block_pool.publish(state.pool, plan.publish)
    state = dataclasses.replace(state, pool=pool)

    def running(i: jax.Array, state: EngineState) -> jax.Array:
        stopped = state.slots.stopped.at[slot].get(mode="fill", fill_value=True)
        return (i < allowed) & ~stopped

    def proceed(carry: tuple[jax.Array, EngineState, Outputs]) -> jax.Array:
        i, state, _ = carry
        return (i < n) & running(i, state).any()

    def decode(carry: tuple[jax.Array, EngineState, Outputs]):
        i, state, out = carry
        live = running(i, state)
        length = state.slots.length.at[slot].get(mode="fill", fill_value=0) + 1
        writes = jnp.where(live, slot, s)
        state = _grow(state, writes, length, size, max_new=1)
        batch = _decode_batch(state, slot, live, size)
        hidden, pages = model.forward(params, state.pages, batch)
        state = dataclasses.replace(state, pages=pages)
        state = _set_length(state, writes, length)
        each = jnp.arange(rows, dtype=I32)
        x = model.logits(params, hidden, each, batch.num_tokens)
        state, out = _sample(state, x, slot, live, length, out, i, shape)
        return i + 1, state, out

    if n > 1:
        _, state, out = lax.while_loop(proceed, decode, (jnp.array(1, I32), state, out))
    return state, out._replace(num_free=state.pool.num_free)


@lru_cache(maxsize=64)
def compiled(model: Model, shape: EngineShape):
    """The jitted launch: f(params, state, packed, rows=R, tokens=T); donates `state`.

    One program for each (R, T) of `shape.launch_shapes()`, and no other. Engines of the
    same model and shape share them.
    """
    return jax.jit(
        partial(step, model=model, shape=shape),
        static_argnames=("rows", "tokens"),
        donate_argnums=1,
    )


def num_compiled(launch: Any) -> int:
    """Programs that a `compiled` launch has so far."""
    return launch._cache_size()
