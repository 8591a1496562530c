"""Drives a decoder over a paged cache the way an engine would, for tests.

Blocks are handed out in shuffled order from pages that start as NaN, so a row that is
read before it is written, or from the wrong block, cannot pass unseen.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.base import Batch
from jaxserve.models.decoder import Decoder
from pallas_kernels import cpu


def forward(decoder: Decoder) -> Any:
    """The jitted forward pass, pages donated; one per decoder for the whole run.

    There are two where a test turns the CPU kernels off.
    """
    return _forward(decoder, cpu.unavailable())


@functools.cache
def _forward(decoder: Decoder, kernels_off: str | None) -> Any:
    del kernels_off
    return jax.jit(
        functools.partial(_logits, decoder),
        donate_argnums=1,
    )


def _logits(decoder: Decoder, params: Any, pages: Any, batch: Batch, index: Any):
    hidden, pages = decoder.forward(params, pages, batch)
    return decoder.logits(params, hidden, index, jnp.int32(len(index))), pages


class PagedRun:
    """Sequences that share one pool of blocks; every call has the same shape."""

    def __init__(
        self,
        decoder: Decoder,
        params: Any,
        *,
        block_size: int = 4,
        num_blocks: int = 64,
        columns: int = 32,
        tokens: int = 160,
        rows: int | None = None,
        seed: int = 0,
    ) -> None:
        self.decoder, self.params = decoder, params
        self.block_size, self.num_blocks, self.columns = block_size, num_blocks, columns
        self.tokens, self.rows = tokens, rows or tokens
        shapes = decoder.page_shapes(num_blocks, block_size)
        self.pages = {
            name: jnp.full(shape.shape, jnp.nan, shape.dtype)
            for name, shape in shapes.items()
        }
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)
        self._blocks: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}

    def batch(self, new: Mapping[str, Sequence[int]]) -> Batch:
        """The batch that appends `new` tokens to each sequence, decode rows first."""
        names = sorted(new, key=lambda name: len(new[name]) != 1)  # stable
        size, rows, absent = self.tokens, self.rows, self.num_blocks
        tokens, positions = np.zeros((2, size), np.int32)
        write = np.full(size, absent, np.int32)
        table = np.full((rows, self.columns), absent, np.int32)
        kv_lens = np.zeros(rows, np.int32)
        cu = np.zeros(rows + 1, np.int32)
        at = 0
        for row, name in enumerate(names):
            start = self.lengths.get(name, 0)
            stop = start + len(new[name])
            blocks = self._blocks.setdefault(name, [])
            while len(blocks) * self.block_size < stop:
                blocks.append(self._free.pop())
            span = slice(at, at + len(new[name]))
            tokens[span] = new[name]
            positions[span] = np.arange(start, stop)
            write[span] = [blocks[p // self.block_size] for p in range(start, stop)]
            table[row, : len(blocks)] = blocks
            kv_lens[row] = self.lengths[name] = stop
            at += len(new[name])
            cu[row + 1 :] = at
        return Batch(
            tokens=jnp.asarray(tokens),
            positions=jnp.asarray(positions),
            write_block=jnp.asarray(write),
            table=jnp.asarray(table),
            kv_lens=jnp.asarray(kv_lens),
            cu_q_lens=jnp.asarray(cu),
            num_decode=jnp.int32(sum(len(ids) == 1 for ids in new.values())),
            num_tokens=jnp.int32(cu[-1]),
        )

    def step(
        self, new: Mapping[str, Sequence[int]], *, every: bool = True
    ) -> dict[str, np.ndarray]:
        """Append tokens; f32[n, V] logits of each sequence's new tokens, or f32[V]."""
        batch = self.batch(new)
        index = jnp.arange(self.rows, dtype=jnp.int32)
        if not every:  # the last token of each row
            index = jnp.maximum(batch.cu_q_lens[1:] - 1, 0)
        run = forward(self.decoder)
        logits, self.pages = run(self.params, self.pages, batch, index)
        names = sorted(new, key=lambda name: len(new[name]) != 1)
        # What padding holds is undefined.
        logits = np.asarray(logits)[: int(batch.num_tokens) if every else len(names)]
        assert np.isfinite(logits).all()
        if not every:
            return {name: logits[row] for row, name in enumerate(names)}
        out, at = {}, 0
        for name in names:
            out[name] = logits[at : at + len(new[name])]
            at += len(new[name])
        return out
