"""From logits to tokens, row by row: no row sees another, whatever the batch.

Owns sampling and log-probabilities. Never sees a slot, a page or a request. One program
serves every mix of rows: the parts that nobody needs (random draws, truncation,
log-probabilities) are skipped at run time by `lax.cond`, so a first request with a new
parameter compiles nothing.
Axes: R rows, V vocabulary, E stop ids, W top log-probabilities.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.config import EngineShape
from jaxserve.device import processors
from jaxserve.device.processors import Tables

F32, I32, U32 = jnp.float32, jnp.int32, jnp.uint32
_GROUP = 128
_ROWS = 8  # sampled at a time


class RowParams(NamedTuple):
    """Sampling parameters of each row, gathered from its slot."""

    key: jax.Array  # u32[R, 2] threefry key data of the request's seed
    sample_index: jax.Array  # i32[R]
    position: jax.Array  # i32[R] index in the sequence of the token to be drawn
    temperature: jax.Array  # f32[R] 0 = greedy
    top_k: jax.Array  # i32[R] 0 or less = all
    top_p: jax.Array  # f32[R]
    min_p: jax.Array  # f32[R]
    barred: jax.Array  # i32[R, E] ids that may not be drawn; negative = none
    tables: jax.Array  # i32[R] slot whose tables the logits go through; S = none


class Logprobs(NamedTuple):
    """Natural logs of the unscaled distribution; zeros where no row wants them."""

    chosen: jax.Array  # f32[R]
    rank: jax.Array  # i32[R] 1 = the likeliest
    top_ids: jax.Array  # i32[R, W]
    top: jax.Array  # f32[R, W] descending


def _ordered(x: jax.Array) -> jax.Array:
    """Map f32 to u32 so that order is kept: a threshold search needs only bits."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, F32(0), x), U32)  # -0 ties with 0
    return jnp.where(bits >> 31 == 1, ~bits, bits | U32(1 << 31))


def _threshold(bits: jax.Array, mass: jax.Array, goal: jax.Array) -> jax.Array:
    """The highest t for which the entries with bits >= t together weigh >= goal.

    A binary search over 32 bits: exact, and many times cheaper than sorting V entries.

    Args:
      bits: u32[R, V] ordered keys. mass: f32[R, V] weights. goal: f32[R].
    """

    def narrow(i: jax.Array, t: jax.Array) -> jax.Array:
        higher = t | (U32(1 << 31) >> i.astype(U32))
        kept = jnp.where(bits >= higher[:, None], mass, F32(0)).sum(axis=1)
        return jnp.where(kept >= goal, higher, t)

    return lax.fori_loop(0, 32, narrow, jnp.zeros(bits.shape[0], U32))


def truncate(logits: jax.Array, params: RowParams) -> jax.Array:
    """-inf for the tokens that top_k, then top_p, then min_p exclude; f32[R, V].

    Ties with the last kept token are kept. `logits` are already scaled by temperature;
    top_p is of the distribution that top_k left, min_p relative to its likeliest token
    (Nguyen et al. 2024).
    """
    rows, vocab = logits.shape
    bits = _ordered(logits)
    wide = (params.top_k <= 0) | (params.top_k > vocab)
    k = jnp.where(wide, vocab, params.top_k).astype(F32)
    kept = bits >= _threshold(bits, jnp.ones_like(logits), k)[:, None]
    probs = jax.nn.softmax(jnp.where(kept, logits, -jnp.inf), axis=-1)
    # Rounding may leave the whole sum just under 1, and top_p = 0 must keep one token.
    total = probs.sum(axis=-1)
    goal = jnp.where(params.top_p >= 1, F32(0), params.top_p * total)
    nucleus = bits >= _threshold(bits, probs, jnp.maximum(goal, F32(1e-30)))[:, None]
    kept &= nucleus | (params.top_p >= 1)[:, None]
    floor = params.min_p * probs.max(axis=-1)
    kept &= probs >= floor[:, None]
    return jnp.where(kept, logits, -jnp.inf)


def argmax(x: jax.Array) -> jax.Array:
    """The first largest entry of each row, i32[R], from f32[R, V] without NaN.

    In two levels where V allows: XLA's CPU backend reduces pairs of value and index ten
    times slower than values alone.
    """
    rows, vocab = x.shape
    if vocab % _GROUP:
        return jnp.argmax(x, axis=-1).astype(I32)
    groups = x.reshape(rows, vocab // _GROUP, _GROUP)
    best = jnp.argmax(groups.max(axis=-1), axis=-1).astype(I32)  # [R]
    group = jnp.take_along_axis(groups, best[:, None, None], axis=1)[:, 0]
    return best * _GROUP + jnp.argmax(group, axis=-1).astype(I32)


def top_k(x: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """(f32[R, W], i32[R, W]): the W largest entries of rows f32[R, V], and where.

    Descending; of equal entries the first comes first. In two levels where V allows:
    the entries looked for lie in the groups with the largest maxima.
    """
    rows, vocab = x.shape
    if vocab % _GROUP or width > vocab // _GROUP:
        values, ids = lax.top_k(x, width)
        return values, ids.astype(I32)
    groups = x.reshape(rows, vocab // _GROUP, _GROUP)
    _, best = lax.top_k(groups.max(axis=-1), width)
    best = jnp.sort(best.astype(I32), axis=-1)  # so that ties keep their order
    candidates = jnp.take_along_axis(groups, best[:, :, None], axis=1)
    values, at = lax.top_k(candidates.reshape(rows, -1), width)
    at = at.astype(I32)
    group = jnp.take_along_axis(best, at // _GROUP, axis=1)
    return values, group * _GROUP + at % _GROUP


def row_keys(params: RowParams) -> jax.Array:
    """fold_in(fold_in(key(seed), sample_index), position) of each row."""

    def one(data: jax.Array, index: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(data, impl="threefry2x32")
        return jax.random.fold_in(jax.random.fold_in(key, index), position)

    return jax.vmap(one)(params.key, params.sample_index, params.position)


def _by_rows(function: Any, operands: Any, used: jax.Array) -> Any:
    """function(operands), a few rows at a time where the device runs them in turn.

    Each row is then one of `_ROWS` in every batch: XLA's sums over a row depend on how
    many rows there are. Only the first `used` i32[] rows are sure to be computed.
    """
    rows = jax.tree.leaves(operands)[0].shape[0]
    if jax.default_backend() != "cpu":
        return function(operands)

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, -rows % _ROWS), *[(0, 0)] * (x.ndim - 1)))
        return x.reshape(len(x) // _ROWS, _ROWS, *x.shape[1:])

    def join(x: jax.Array) -> jax.Array:
        return x.reshape(len(x) * _ROWS, *x.shape[2:])[:rows]

    groups = jax.tree.map(split, operands)

    def some(i: jax.Array | int) -> Any:
        at = partial(lax.dynamic_index_in_dim, index=i, keepdims=False)
        return function(jax.tree.map(at, groups))

    def add(i: jax.Array, out: Any) -> Any:
        put = partial(lax.dynamic_update_index_in_dim, index=i, axis=0)
        return jax.tree.map(put, out, some(i))

    count = -(-rows // _ROWS)
    out = jax.tree.map(
        lambda x: jnp.zeros((count, *x.shape), x.dtype), jax.eval_shape(some, 0)
    )
    return jax.tree.map(join, lax.fori_loop(0, -(-used // _ROWS), add, out))


def _choose(
    tables: Tables, shape: EngineShape, operands: tuple[jax.Array, RowParams]
) -> jax.Array:
    """A token for each row, from its logits as its tables leave them."""
    x, params = operands
    processed = params.tables < len(tables.context)
    x = lax.cond(
        processed.any(),
        lambda y: processors.apply(tables, y, params.tables, params.position, shape),
        lambda y: y,
        x,
    )
    greedy = params.temperature <= 0
    scaled = x / jnp.where(greedy, F32(1), params.temperature)[:, None]
    narrow = (params.top_k > 0) | (params.top_p < 1) | (params.min_p > 0)
    scaled = lax.cond(
        (narrow & ~greedy).any(),
        lambda y: jnp.where(narrow[:, None], truncate(y, params), y),
        lambda y: y,
        scaled,
    )
    noise = lax.cond(
        greedy.all(),
        lambda keys: jnp.zeros_like(x),
        jax.vmap(lambda key: jax.random.gumbel(key, (x.shape[1],), F32)),
        row_keys(params),
    )
    return argmax(jnp.where(greedy[:, None], x, scaled + noise))


def sample(
    logits: jax.Array,
    tables: Tables,
    params: RowParams,
    used: jax.Array,
    shape: EngineShape,
) -> jax.Array:
    """One token for each of the first `used` i32[] rows, i32[R], from f32[R, V] logits.

    Random rows take the argmax of logits / temperature plus Gumbel noise drawn from the
    row's own key, so a row's token depends on its request and position alone.
    """
    rows, vocab = logits.shape
    plain = params.tables >= len(tables.context)
    plain &= params.temperature <= 0

    def bar(x: jax.Array) -> jax.Array:
        column = jnp.where(params.barred < 0, vocab, params.barred)
        row = jnp.arange(rows, dtype=I32)[:, None]
        return x.at[row, column].set(-jnp.inf, mode="drop")

    def choose(x: jax.Array) -> jax.Array:
        """Some rows at a time: the temporaries of all would be several times `x`."""
        return _by_rows(partial(_choose, tables, shape), (x, params), used)

    # Not one `cond` for each part: what a branch passes on unchanged is copied, and
    # the logits are large. Where rows are random that copy does not count.
    barred = (params.barred >= 0).any().astype(I32)
    case = jnp.where(plain.all(), barred, 2)
    branches = (argmax, lambda x: argmax(bar(x)), lambda x: choose(bar(x)))
    return lax.switch(case, branches, logits)


def all_logprobs(logits: jax.Array, tokens: jax.Array, width: int) -> Logprobs:
    """Of the tokens i32[R] and of the `width` likeliest, from logits f32[R, V]."""
    logs = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(logs, tokens[:, None], axis=1)[:, 0]
    rank = 1 + (logs > chosen[:, None]).sum(axis=1, dtype=I32)
    top, ids = top_k(logs, width)
    return Logprobs(chosen, rank, ids, top)


def logprobs(
    logits: jax.Array,
    tokens: jax.Array,
    wanted: jax.Array,
    used: jax.Array,
    *,
    width: int,
) -> Logprobs:
    """Log-probabilities of the chosen tokens and of the `width` likeliest.

    Args:
      logits: f32[R, V]; tokens: i32[R]; wanted: bool[R]. Computed if any row wants
        them.
      used: i32[] rows that matter; the others follow.
    """
    rows, vocab = logits.shape
    width = min(width, vocab)

    def compute(operands: tuple[jax.Array, jax.Array]) -> Logprobs:
        return all_logprobs(*operands, width)

    def skip() -> Logprobs:
        return Logprobs(
            jnp.zeros(rows, F32),
            jnp.zeros(rows, I32),
            jnp.zeros((rows, width), I32),
            jnp.zeros((rows, width), F32),
        )

    return lax.cond(
        wanted.any(), lambda: _by_rows(compute, (logits, tokens), used), skip
    )
