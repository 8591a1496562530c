"""Log-probabilities of prompts: of the tokens that are in a launch's chunks.

Owns which of the batch's tokens go through the head for them. Never sees a slot's
contents. Axes as in state.py; K tokens at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.core import StepPlan
from jaxserve.device import sampling

I32 = jnp.int32
_SCORED = 32  # prompt tokens whose logits are there at a time


def score(
    logits: Callable[[jax.Array, jax.Array], jax.Array],
    plan: StepPlan,
    num_decode: jax.Array | int,
    out: sampling.Logprobs,
) -> sampling.Logprobs:
    """Log-probabilities of the tokens after the chunk tokens of rows that ask.

    These rows are listed first, so their tokens lie together. Only they go through the
    head, a few at a time: it costs nothing where no row asks.

    Args:
      logits: f32[K, V] of the batch's tokens i32[K], of which i32[] count.
      out: zeros.
    """
    slot, _, token = plan.chunk.T
    tokens, group = len(slot), min(_SCORED, len(slot))
    mine = slot[:, None] == plan.decode[None, :, 0]  # [T, R]
    follow = jnp.where(mine, plan.follow[None, :], -1).max(axis=1)
    goes_on = slot == jnp.append(slot[1:], -1)
    target = jnp.where(goes_on, jnp.append(token[1:], 0), follow)
    count = (follow >= 0).sum(dtype=I32)

    def some(i: jax.Array, out: sampling.Logprobs) -> sampling.Logprobs:
        # The last group may begin in the one before it, and does some of it again.
        start = jnp.minimum(i * group, tokens - group)
        at = start + jnp.arange(group, dtype=I32)
        x = logits(jnp.minimum(num_decode + at, tokens - 1), count - start)
        wanted = lax.dynamic_slice_in_dim(target, start, group)
        logs = sampling.all_logprobs(x, wanted, out.top_ids.shape[-1])
        put = partial(lax.dynamic_update_slice_in_dim, start_index=start, axis=0)
        return jax.tree.map(put, out, logs)

    return lax.fori_loop(0, -(-count // group), some, out)
