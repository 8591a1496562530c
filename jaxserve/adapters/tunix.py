"""A rollout engine for tunix (extra `tunix`): jaxserve samples, tunix learns.

Owns tunix's names and layouts: prompts padded on the left, outputs without padding.
Never sees a loss. Give it to a cluster as

    ClusterConfig(
        rollout_engine=functools.partial(JaxserveRollout, model=decoder), ...
    )
"""

# The library is an extra, which most checkouts do without.
# pyright: reportMissingImports=false

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl.rollout import base_rollout

from jaxserve.config import EngineConfig
from jaxserve.models.base import Model, Params
from jaxserve.outputs import CompletionOutput
from jaxserve.rollout import Identity, Rollout, Rollouts, token_logprobs
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.policies import Policy


class JaxserveRollout(base_rollout.BaseRollout):
    """tunix's `BaseRollout` on an engine.

    Args:
      rollout_actor: holds the weights. Where tunix trains this very module it sends
        none, so each call takes those that the module has by then.
      tokenizer: tunix's, or one that its `TokenizerAdapter` takes.
      mesh: where the actor lives. Weights are taken as they are, sharding included.
      rollout_config: of the cluster; each `generate` is given its own.
      model: computes what the actor computes.
      to_params: from a state of the actor (`nnx.state`) to the model's parameters.
        None: the state as a dict is of their structure and shapes.
      config, policy: as in `Engine`. None: sequences as long as `rollout_config` asks
        for.
    """

    def __init__(
        self,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: Any = None,
        rollout_config: base_rollout.RolloutConfig | None = None,
        *,
        model: Model,
        to_params: Callable[[nnx.State], Params] | None = None,
        config: EngineConfig | None = None,
        policy: Policy | None = None,
    ):
        del mesh
        if not isinstance(tokenizer, TokenizerAdapter):
            tokenizer = TokenizerAdapter(tokenizer)
        if config is None and rollout_config is not None:
            longest = rollout_config.max_prompt_length
            longest += rollout_config.max_tokens_to_generate
            config = EngineConfig(max_model_len=longest, max_logprobs=0)
        self._actor, self._tokenizer = rollout_actor, tokenizer
        self._model, self._to_params = model, to_params or nnx.to_pure_dict
        state = nnx.state(rollout_actor, nnx.Param)
        self._taken, self._params = Identity(state), self._to_params(state)
        self._rollouts = Rollouts(model, self._params, config, policy)

    @property
    def rollouts(self) -> Rollouts:
        """What serves; its `engine` has statistics, and frees the KV memory."""
        return self._rollouts

    def generate(
        self,
        prompts: list[str],
        rollout_config: base_rollout.RolloutConfig,
        **kwargs: Any,
    ) -> base_rollout.RolloutOutput:
        """One output for each prompt, sampled with the current weights.

        Log-probabilities are of the model's own distribution, as those of tunix's
        learner: not divided by the temperature.

        Args:
          kwargs: further fields of `SamplingParams`.

        Raises:
          ValueError: a prompt cannot be served; none has run.
        """
        ids = [self._encode(prompt) for prompt in prompts]
        sampling = self._sampling(rollout_config, kwargs)
        outputs = self._rollouts.generate(self._current(), ids, sampling)
        completions = [output.outputs[0] for output in outputs]
        tokens = [one.token_ids for one in completions]
        logprobs = None
        if rollout_config.return_logprobs:
            logprobs = [_logprobs(one) for one in completions]
        return base_rollout.RolloutOutput(
            text=[self._tokenizer.decode(row) for row in tokens],
            logits=None,
            tokens=[np.asarray(row, np.int32) for row in tokens],
            left_padded_prompt_tokens=_left_padded(
                ids, rollout_config.max_prompt_length, self.pad_id()
            ),
            logprobs=logprobs,
        )

    def get_per_token_logps(
        self, prompt_tokens: jax.Array, completion_tokens: jax.Array
    ) -> jax.Array:
        """f32[B, L] of completions i32[B, L] to prompts i32[B, P], padded on the left.

        A forward pass with the current weights. `model` needs `sequence_logits`.
        """
        pad = jnp.int32(self.pad_id())
        return _score(
            self._current(), prompt_tokens, completion_tokens, pad, model=self._model
        )

    def update_params(
        self, params: Any, filter_types: tuple[Any, ...] | None = None
    ) -> None:
        """Sample with these weights from the next `generate` on: O(1), no compilation.

        Args:
          params: a state of the actor, or of the part of it that `filter_types` names,
            as with LoRA; it is written to the actor.
        """
        del filter_types
        # No more than that: tunix forbids transfers meanwhile, which launches are.
        nnx.update(self._actor, params)

    def _current(self) -> Params:
        """The actor's weights, as parameters of the model."""
        state = nnx.state(self._actor, nnx.Param)
        identity = Identity(state)
        if identity != self._taken:
            self._taken, self._params = identity, self._to_params(state)
        return self._params

    def pad_id(self) -> int:
        """The tokenizer's."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """The tokenizer's."""
        return self._tokenizer.eos_id()

    def model(self) -> nnx.Module:
        """The actor."""
        return self._actor

    def _encode(self, prompt: str) -> list[int]:
        """As tunix's own sampler does: one BOS, if there is one."""
        ids, bos = self._tokenizer.encode(prompt), self._tokenizer.bos_id()
        return self._tokenizer.dedup_bos_ids([bos, *ids] if bos else list(ids))

    def _sampling(
        self, config: base_rollout.RolloutConfig, more: dict[str, Any]
    ) -> SamplingParams:
        stops = config.eos_tokens
        fields: dict[str, Any] = {
            "max_tokens": config.max_tokens_to_generate,
            "temperature": config.temperature,
            "top_p": 1.0 if config.top_p is None else config.top_p,
            "top_k": 0 if config.top_k is None else config.top_k,
            "seed": _seed(config.seed),
            "stop_token_ids": [self.eos_id()] if stops is None else stops,
            "ignore_eos": stops is not None,
            "logprobs": 0,
        }
        return SamplingParams(**(fields | more))


@functools.partial(jax.jit, static_argnames="model")
def _score(
    params: Params,
    prompts: jax.Array,
    completions: jax.Array,
    pad_id: jax.Array,
    *,
    model: Any,
) -> jax.Array:
    """See `get_per_token_logps`."""
    # Padding is what precedes the first token, for a prompt may hold the pad id too.
    started = jnp.cumsum(prompts != pad_id, axis=1, dtype=jnp.int32) > 0
    lengths = started.sum(axis=1, dtype=jnp.int32)
    width = prompts.shape[1]
    source = (jnp.arange(width)[None, :] + width - lengths[:, None]) % width
    rollout = Rollout(
        prompt_tokens=jnp.take_along_axis(prompts, source, axis=1),
        prompt_lengths=lengths,
        tokens=completions,
        logprobs=jnp.zeros(completions.shape, jnp.float32),
        mask=jnp.ones(completions.shape, bool),
        stopped=jnp.ones(len(completions), bool),
        weight_version=0,
    )
    return token_logprobs(model, params, rollout)


def _logprobs(completion: CompletionOutput) -> np.ndarray:
    pairs = zip(completion.token_ids, completion.logprobs or (), strict=True)
    return np.asarray([entry[token].logprob for token, entry in pairs], np.float32)


def _left_padded(
    prompts: Sequence[Sequence[int]], width: int, pad_id: int
) -> np.ndarray:
    """i32[B, P]: of the width asked for; if one does not fit, of a power of two."""
    longest = max(map(len, prompts))
    if longest > width:
        width = 1 << (longest - 1).bit_length()
    out = np.full((len(prompts), width), pad_id, np.int32)
    for row, ids in zip(out, prompts, strict=True):
        row[width - len(ids) :] = ids
    return out


def _seed(seed: Any) -> int | None:
    """An integer, or a key of jax.random, as a seed."""
    if seed is None or isinstance(seed, int):
        return seed
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    words = np.asarray(seed).astype(np.uint32).reshape(-1).tolist()
    return sum(word << (32 * i) for i, word in enumerate(words[-2:]))
