"""Logits processors: masks, biases and penalties of the slots that ask for any.

Owns their tables and the order in which they apply. Never sees a request. A slot's
tables are written by a program of their own, before the launch that admits the request;
a launch only adds the tokens that it draws. Slots that ask for nothing have stale
tables, which count for nothing.

Axes: S slots, R rows, V vocabulary; K, W, G and C as in `jaxserve/processors.py`.
"""

from __future__ import annotations

import dataclasses
import math
from functools import lru_cache

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.config import EngineShape
from jaxserve.processors import context_columns, setup_fields

F32, I32, U32 = jnp.float32, jnp.int32, jnp.uint32
_PIECE = 512  # columns of the context counted at a time


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tables:
    """What each slot's logits go through.

    Attributes:
      settings: `setup_fields` of each slot, side by side: one row is one gather.
      context: token ids, prompt and output, as far as the sequence goes.
    """

    settings: jax.Array  # i32[S, sum of the fields]
    context: jax.Array  # i32[S, C]


def init(vocab_size: int, shape: EngineShape) -> Tables:
    """Tables of slots that nobody took."""
    s = shape.max_slots
    size = sum(map(math.prod, setup_fields(shape, vocab_size).values()))
    return Tables(
        settings=jnp.zeros((s, size), I32),
        context=jnp.zeros((s, context_columns(shape)), I32),
    )


def write(tables: Tables, packed: jax.Array) -> Tables:
    """Write one slot's tables.

    Args:
      tables: donated by `compiled`.
      packed: i32 vector, `pack_setup` of a `Setup`; slot S writes nothing.
    """
    slot, size = packed[0], tables.settings.shape[1]
    settings, context = packed[1 : 1 + size], packed[1 + size :]
    return Tables(
        settings=tables.settings.at[slot].set(settings, mode="drop"),
        context=tables.context.at[slot].set(context, mode="drop"),
    )


@lru_cache(maxsize=64)
def compiled(vocab_size: int, shape: EngineShape):
    """The jitted `write`, one program; donates the tables."""
    del vocab_size, shape  # engines of the same share it
    return jax.jit(lambda tables, packed: write(tables, packed), donate_argnums=0)


def drawn(
    tables: Tables, slot: jax.Array, position: jax.Array, token: jax.Array
) -> Tables:
    """Add the tokens i32[R] drawn for position i32[R] of the slots; padding: S."""
    context = tables.context.at[slot, position].set(token, mode="drop")
    return dataclasses.replace(tables, context=context)


def apply(
    tables: Tables,
    x: jax.Array,
    slot: jax.Array,
    position: jax.Array,
    shape: EngineShape,
) -> jax.Array:
    """The logits f32[R, V] that tokens are drawn from.

    In vLLM's order (vllm/v1/sample/sampler.py): allowed tokens, bad words, biases,
    penalties; all before the temperature. What is excluded is -inf and stays so.

    Args:
      x: the model's logits, perhaps without the stop ids.
      slot: i32[R]; S leaves a row as it is.
      position: i32[R] tokens of the context: the index of the token to be drawn.
    """
    rows, vocab = x.shape
    row = jnp.arange(rows, dtype=I32)[:, None]
    ours = slot < len(tables.context)
    slot = jnp.minimum(slot, len(tables.context) - 1)
    settings, at = tables.settings[slot], 0
    fields: dict[str, jax.Array] = {}
    for name, dims in setup_fields(shape, vocab).items():
        size = math.prod(dims)
        fields[name] = settings[:, at : at + size].reshape(rows, *dims)
        at += size
    y = jnp.where(_may_be_drawn(fields["mask"], vocab), x, -jnp.inf)
    prompt, length = fields["prompt_tokens"], position[:, None]
    last = _completing(tables, fields["bad_words"], slot, length, prompt, vocab)
    biases = lax.bitcast_convert_type(fields["biases"], F32)
    # One scatter for both: each takes long to compile.
    ids = jnp.concatenate([last, fields["bias_ids"]], axis=1)
    biases = jnp.concatenate([jnp.full(last.shape, -jnp.inf, F32), biases], axis=1)
    y = y.at[row, ids].add(biases, mode="drop")
    penalties = lax.bitcast_convert_type(fields["penalties"], F32)
    penalized = (penalties != jnp.array([[1, 0, 0]], F32)).any(axis=1) & ours
    length = jnp.where(penalized, position, 0)[:, None]
    y = _penalize(tables, y, slot, length, prompt, penalties)
    return jnp.where(ours[:, None], y, x)


def _may_be_drawn(mask: jax.Array, vocab: int) -> jax.Array:
    """bool[R, V] of a mask's words i32[R, ceil(V / 32)]."""
    words = lax.bitcast_convert_type(mask, U32)
    bits = words[:, :, None] >> jnp.arange(32, dtype=U32)[None, None, :]
    return (bits & 1).reshape(len(mask), -1)[:, :vocab] > 0


def _completing(
    tables: Tables,
    words: jax.Array,
    slot: jax.Array,
    length: jax.Array,
    prompt: jax.Array,
    vocab: int,
) -> jax.Array:
    """i32[R, W] tokens that would complete a bad word i32[R, W, G], V where none would.

    As in vLLM the word must lie in the output: its tokens in the prompt do not count.

    Args:
      length, prompt: i32[R, 1] tokens of the context and of the prompt.
    """
    at = length - jnp.arange(words.shape[2] - 1, 0, -1, dtype=I32)[None, :]
    before = tables.context.at[slot[:, None], at].get(mode="clip")
    before = jnp.where(at >= prompt, before, -2)[:, None, :]  # [R, 1, G - 1]
    start, last = words[..., :-1], words[..., -1]
    met = ((start < 0) | (start == before)).all(axis=-1)
    return jnp.where(met & (last >= 0), last, vocab)


def _penalize(
    tables: Tables,
    x: jax.Array,
    slot: jax.Array,
    length: jax.Array,
    prompt: jax.Array,
    penalties: jax.Array,
) -> jax.Array:
    """Repetition over prompt and output (Keskar et al. 2019), then frequency and
    presence over the output alone, as OpenAI defines them.

    Args:
      length: i32[R, 1] tokens of the context; 0 where there are no penalties.
      prompt: i32[R, 1] those of the prompt. penalties: f32[R, 3].
    """
    rows, vocab = x.shape
    row = jnp.arange(rows, dtype=I32)[:, None]

    def count(piece: jax.Array, counts: jax.Array) -> jax.Array:
        """Those of the prompt, then those of the output."""
        at = (piece * _PIECE + jnp.arange(_PIECE, dtype=I32))[None, :]
        token = tables.context.at[slot[:, None], at].get(mode="clip")
        token = jnp.where(at < prompt, token, vocab + token)
        token = jnp.where(at < length, token, 2 * vocab)
        return counts.at[row, token].add(1, mode="drop")

    pieces = -(-jnp.max(length) // _PIECE)  # as far as the longest goes
    counts = lax.fori_loop(0, pieces, count, jnp.zeros((rows, 2 * vocab), I32))
    output = counts[:, vocab:]
    seen = counts[:, :vocab] + output > 0
    repetition, frequency, presence = jnp.split(penalties, 3, axis=1)  # [R, 1] each
    repetition = jnp.where(seen, repetition, F32(1))
    x = jnp.where(x > 0, x / repetition, x * repetition)
    x = x - frequency * output.astype(F32)
    return x - presence * (output > 0).astype(F32)
