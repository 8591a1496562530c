"""An integer model whose every output betrays a wrong, stale, missing or repeated
block.

Owns the test instrument: a KV row stores its token id, and the next token is an
order-sensitive hash of the whole context read back *through the block table*:
h = 0; for each id: h = (31 h + id + 1) mod 1000003; next = h mod 97. Exact, and
compiles in milliseconds. Never sees a slot or a request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.base import Batch, Pages, Params

VOCAB = 97
BASE, MODULUS = 31, 1_000_003
I32 = jnp.int32
MAX_CONTEXT = 4096  # so that a sum of residues stays under 2**32


def next_token(context: Sequence[int]) -> int:
    """The model by its definition, for any context; the tests' oracle.

    Args:
      context: token ids, each plus the mark of the weights that its row was written
        with; marks are under 4096.
    """
    h = 0
    for token in context:
        h = (BASE * h + token + 1) % MODULUS
    return h % VOCAB


def _powers(n: int) -> np.ndarray:
    out, power = np.empty(n, np.uint32), 1
    for i in range(n):
        out[i], power = power, power * BASE % MODULUS
    return out


@dataclasses.dataclass(frozen=True)
class HashModel:
    """The integer model; vocabulary 97, `eos_ids` end a sequence.

    The logit of token v is -((v - next) mod 97) / 4, so that the greedy token is `next`
    and sampling draws from a distribution that the whole context decides.
    """

    eos_ids: tuple[int, ...] = ()

    @property
    def vocab_size(self) -> int:
        return VOCAB

    def init_params(self, mark: int = 0) -> Params:
        """The weights: what is added to every logit, and the mark on every KV row.

        A row written with other weights bears another mark, and changes what follows.
        """
        return {"bias": jnp.zeros(VOCAB, jnp.float32), "mark": jnp.array(mark, I32)}

    def page_shapes(
        self, num_blocks: int, block_size: int
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """One group: i32[P, B] token ids, marked."""
        return {"ids": jax.ShapeDtypeStruct((num_blocks, block_size), I32)}

    def forward(
        self, params: Params, pages: Pages, batch: Batch
    ) -> tuple[_Hidden, Pages]:
        ids = pages["ids"]
        size = ids.shape[1]
        marked = batch.tokens + params["mark"]
        ids = ids.at[batch.write_block, batch.positions % size].set(marked, mode="drop")
        hidden = _Hidden(ids, batch.table, batch.cu_q_lens, batch.positions)
        return hidden, {"ids": ids}

    def logits(
        self, params: Params, hidden: _Hidden, index: jax.Array, used: jax.Array
    ) -> jax.Array:
        del used
        ids, table, starts, positions = hidden
        rows, columns, size = len(index), table.shape[1], ids.shape[1]
        limit = columns * size
        if limit > MAX_CONTEXT:
            raise ValueError(
                f"a context of {limit} tokens must not exceed {MAX_CONTEXT}, or the "
                "hash overflows; lower max_model_len"
            )
        row = (starts[None, 1:] <= index[:, None]).sum(axis=1, dtype=jnp.int32)
        blocks = table.at[row].get(mode="clip")  # [K, M]
        context = ids.at[blocks].get(mode="fill", fill_value=0)  # [K, M, B]
        context = context.reshape(rows, limit).astype(jnp.uint32)
        position = jnp.arange(limit, dtype=I32)[None, :]
        ahead = positions[index][:, None] - position  # tokens that follow this one
        power = jnp.asarray(_powers(limit)).at[ahead].get(mode="fill", fill_value=0)
        power = jnp.where(ahead >= 0, power, jnp.uint32(0))
        residue = (context + jnp.uint32(1)) * power % jnp.uint32(MODULUS)
        h = residue.sum(axis=1, dtype=jnp.uint32) % jnp.uint32(MODULUS)
        token = (h % jnp.uint32(VOCAB)).astype(I32)
        away = (jnp.arange(VOCAB, dtype=I32)[None, :] - token[:, None]) % VOCAB
        logits = away.astype(jnp.float32) * jnp.float32(-0.25)
        return logits + params["bias"][None, :]


class _Hidden(NamedTuple):
    """What the logits of any token are read from."""

    ids: jax.Array  # i32[P, B]
    table: jax.Array  # i32[R, M]
    starts: jax.Array  # i32[R + 1] of each row's tokens
    positions: jax.Array  # i32[T]
