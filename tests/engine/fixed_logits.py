"""A model whose logits are the test's, and an engine on it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve import Engine, EngineConfig, RequestOutput, SamplingParams
from jaxserve.models.base import Batch, Pages, Params
from jaxserve.models.detokenizer import Decodes

VOCAB = 8


@dataclasses.dataclass(frozen=True)
class FixedLogits:
    """The same logits at every position, those of `params`; no KV worth the name."""

    eos_ids: tuple[int, ...] = ()

    @property
    def vocab_size(self) -> int:
        return VOCAB

    def page_shapes(
        self, num_blocks: int, block_size: int
    ) -> dict[str, jax.ShapeDtypeStruct]:
        return {"none": jax.ShapeDtypeStruct((num_blocks, block_size), jnp.int32)}

    def forward(self, params: Params, pages: Pages, batch: Batch) -> tuple[None, Pages]:
        del params, batch
        return None, pages

    def logits(
        self, params: Params, hidden: None, index: jax.Array, used: jax.Array
    ) -> jax.Array:
        del hidden, used
        return jnp.broadcast_to(params["logits"], (len(index), VOCAB))


MODEL = FixedLogits(eos_ids=(5, 6))


CONFIG = EngineConfig(
    max_model_len=48,
    max_num_seqs=4,
    max_num_batched_tokens=4,  # one token bucket, hence one program with steps
    block_size=4,
    num_blocks=48,
    max_logprobs=3,
)


class Fixed:
    """An engine whose model always has the same logits; -inf past those given."""

    def __init__(
        self,
        logits: list[float],
        steps: int = 1,
        launches: int = 1,
        tokenizer: Decodes | None = None,
    ):
        padded = [*logits, *[-np.inf] * (VOCAB - len(logits))]
        self.engine = Engine(
            MODEL,
            {"logits": jnp.array([padded], jnp.float32)},
            dataclasses.replace(
                CONFIG, num_scheduler_steps=steps, launches_in_flight=launches
            ),
            tokenizer=tokenizer,
        )

    def run(self, *requests: SamplingParams, prompt: int = 10) -> list:
        """Their completions, served together."""
        return [output.outputs[0] for output in self.serve(*requests, prompt=prompt)]

    def serve(self, *requests: SamplingParams, prompt: int = 10) -> list[RequestOutput]:
        """Their last outputs, served together; each prompt is that many 1s."""
        for i, params in enumerate(requests):
            self.engine.add_request(f"{i}", [1] * prompt, params)
        done, self.told = {}, 0
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                done[output.request_id] = output
                self.told += 1
        return [done[f"{i}"] for i in range(len(requests))]
