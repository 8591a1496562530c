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

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.base import Batch, Pages, Params

VOCAB = 97
BASE, MODULUS = 31, 1_000_003
MAX_CONTEXT = 4096  # so that a sum of residues stays under 2**32


def next_token(context: Sequence[int]) -> int:
    """The model by its definition, for any context; the tests' oracle."""
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

    def init_params(self) -> Params:
        """An empty-handed pytree: one array, added to every logit."""
        return {"bias": jnp.zeros(VOCAB, jnp.float32)}

    def page_shapes(
        self, num_blocks: int, block_size: int
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """One group: i32[P, B] token ids."""
        return {"ids": jax.ShapeDtypeStruct((num_blocks, block_size), jnp.int32)}

    def forward(
        self, params: Params, pages: Pages, batch: Batch
    ) -> tuple[jax.Array, Pages]:
        ids = pages["ids"]
        size = ids.shape[1]
        ids = ids.at[batch.write_block, batch.positions % size].set(
            batch.tokens, mode="drop"
        )
        rows, columns = batch.table.shape
        limit = columns * size
        if limit > MAX_CONTEXT:
            raise ValueError(
                f"a context of {limit} tokens must not exceed {MAX_CONTEXT}, or the "
                "hash overflows; lower max_model_len"
            )
        context = ids.at[batch.table].get(mode="fill", fill_value=0)  # [R, M, B]
        context = context.reshape(rows, limit).astype(jnp.uint32)
        position = jnp.arange(limit, dtype=jnp.int32)[None, :]
        ahead = batch.kv_lens[:, None] - 1 - position  # tokens that follow this one
        power = jnp.asarray(_powers(limit)).at[ahead].get(mode="fill", fill_value=0)
        power = jnp.where(ahead >= 0, power, jnp.uint32(0))
        residue = (context + jnp.uint32(1)) * power % jnp.uint32(MODULUS)
        h = residue.sum(axis=1, dtype=jnp.uint32) % jnp.uint32(MODULUS)
        token = (h % jnp.uint32(VOCAB)).astype(jnp.int32)
        away = (jnp.arange(VOCAB, dtype=jnp.int32)[None, :] - token[:, None]) % VOCAB
        logits = away.astype(jnp.float32) * jnp.float32(-0.25)
        return logits + params["bias"][None, :], {"ids": ids}
