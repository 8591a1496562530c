"""What the engine asks of a model: pure functions over a params pytree and KV pages.

Owns the Model protocol and the ragged batch that one forward pass takes. Never sees a
request, a slot or a sampling parameter.

Axes: T tokens of the batch, R rows (sequences), M columns of a row's block list,
P blocks, B tokens a block, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax

from jaxserve.config import EngineConfig
from jaxserve.kv_tiers.block_file import file_bytes

Params = Any
"""A pytree of arrays; always an argument of a jitted function, never closed over."""

Pages = dict[str, jax.Array]
"""KV memory by cache group; donated to and returned by every forward."""


class Batch(NamedTuple):
    """A ragged batch: rows [0, num_decode) hold one query token each, then prompt
    chunks.

    The tokens of row r are [cu_q_lens[r], cu_q_lens[r + 1]) of the token axis; what
    lies past cu_q_lens[R] is padding, and so is a row without tokens. Idle rows have a
    token each, which counts for nothing; those at the end need not be computed.
    """

    tokens: jax.Array  # i32[T] token ids; padding: 0
    positions: jax.Array  # i32[T] index in the sequence; padding: 0
    write_block: jax.Array  # i32[T] block that takes the token's KV row; P = write none
    table: jax.Array  # i32[R, M] block behind each column; P = hole
    kv_lens: jax.Array  # i32[R] KV rows after this batch's writes; 0 = an idle row
    cu_q_lens: jax.Array  # i32[R + 1] where each row's tokens start
    # i32[] rows that hold exactly one token, idle ones included; an int where no launch
    # of this shape can hold a chunk, so that the code for chunks is left out
    num_decode: jax.Array | int
    num_tokens: jax.Array  # i32[] leading tokens of rows that are not idle


class Model(Protocol):
    """A decoder. Implementations are frozen and hashable: a static argument of jit."""

    @property
    def vocab_size(self) -> int:
        """V, the width of the logits."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Token ids that end a sequence unless the request ignores them."""
        ...

    def page_shapes(
        self, num_blocks: int, block_size: int
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of each cache group's pages for P blocks of B tokens."""
        ...

    def forward(self, params: Params, pages: Pages, batch: Batch) -> tuple[Any, Pages]:
        """Write the batch's KV rows, attend, and return (hidden states, pages).

        The hidden states are a pytree for `logits` alone, which asks for few of them.
        """
        ...

    def logits(
        self, params: Params, hidden: Any, index: jax.Array, used: jax.Array
    ) -> jax.Array:
        """f32[K, V], of the token after each of the batch's tokens i32[K].

        Only the first `used` i32[] are read; the others need not be computed.
        """
        ...


def block_bytes(model: Model, block_size: int) -> int:
    """Bytes of one KV block, of all groups and layers."""
    one, two = (model.page_shapes(n, block_size) for n in (1, 2))

    def total(shapes: Mapping[str, Any]) -> int:
        return sum(math.prod(s.shape) * s.dtype.itemsize for s in shapes.values())

    return total(two) - total(one)


def num_swap_blocks(model: Model, config: EngineConfig) -> int:
    """Host blocks below the device: as configured, or what swap_space_bytes holds."""
    if config.num_swap_blocks is not None:
        return config.num_swap_blocks
    if not config.swap_space_bytes:
        return 0
    return config.swap_space_bytes // block_bytes(model, config.block_size)


def num_disk_blocks(model: Model, config: EngineConfig) -> int:
    """Blocks on disk: as configured, or what disk_cache_bytes holds."""
    if config.num_disk_blocks is not None:
        return config.num_disk_blocks
    if not config.disk_cache_bytes:
        return 0
    return config.disk_cache_bytes // file_bytes(block_bytes(model, config.block_size))


def num_blocks(model: Model, config: EngineConfig) -> int:
    """The KV blocks of an engine: as configured, else what fits in cache_bytes.

    Never more than max_num_seqs sequences of full length can use, nor less than one.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    a_block = block_bytes(model, config.block_size)
    a_sequence = -(-config.max_model_len // config.block_size)
    fitting = config.cache_bytes // a_block
    if fitting < a_sequence:
        raise ValueError(
            f"cache_bytes={config.cache_bytes} holds {fitting} blocks of {a_block} "
            f"bytes, but one sequence of max_model_len={config.max_model_len} needs "
            f"{a_sequence}; raise cache_bytes to {a_sequence * a_block} or lower "
            "max_model_len"
        )
    return min(fitting, config.max_num_seqs * a_sequence)
