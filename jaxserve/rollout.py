"""Rollouts: prompts in, padded arrays of sampled tokens out, for a JAX program that
learns from them.

Owns the arrays and the rule by which weights count as other ones. Never sees a loss, an
optimizer or a reward.

Axes: B rows (prompts times samples), P prompt tokens, L output tokens, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.core import random_seed
from jaxserve.engine import Engine
from jaxserve.executors.jax_executor import JaxExecutor
from jaxserve.models.base import Model, Params
from jaxserve.models.tokenizer import Tokenizer
from jaxserve.outputs import RequestOutput
from jaxserve.prompts import Prompt, ReadPrompt, read
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.policies import Policy

Prompts = Sequence[Prompt] | np.ndarray | jax.Array
"""Texts, lists of token ids or mappings, one each; or integers [prompts, P]."""


class Rollout(NamedTuple):
    """Sampled sequences as arrays on the default device; a pytree.

    Rows are in the order of the prompts, and the n samples of a prompt follow one
    another: row i * n + j is sample j of prompt i. So `x.reshape(-1, n)` has a row for
    each prompt.
    """

    prompt_tokens: jax.Array  # i32[B, P] from the left; pad_id behind them
    prompt_lengths: jax.Array  # i32[B]
    tokens: jax.Array  # i32[B, L] sampled, the stop token included; pad_id behind them
    # f32[B, L] natural log of each token's probability under the model as it is: not
    # divided by the temperature, not truncated; 0 where there is no token
    logprobs: jax.Array
    mask: jax.Array  # bool[B, L] there is a token
    stopped: jax.Array  # bool[B] ended by a stop token or string; else cut at a limit
    weight_version: int  # of the weights that sampled them (`Engine.weight_version`)


class Differentiable(Protocol):
    """A model whose logits can be had without a cache, as `models.decoder.Decoder`."""

    def sequence_logits(
        self, params: Params, tokens: jax.Array, positions: jax.Array
    ) -> jax.Array:
        """f32[B, K, V] of what follows positions i32[B, K] of sequences i32[B, T]."""
        ...


class Rollouts:
    """Serves rollouts with weights that change from call to call.

    Args:
      model, config, policy: as in `Engine`.
      params: the first weights; their structure, shapes and dtypes are those of all
        that follow.
      tokenizer: for prompts, stop strings and outputs that are text.
      max_prompt_tokens: P. None: of prompts in an array, its width; of others, the
        longest of the call rounded up to a power of two.
      pad_id: fills rows up.
      warmup: compile every launch shape now rather than when it is first needed; then
        no rollout compiles anything.

    Attributes:
      engine: what serves them: `engine.stats()`, `engine.release_kv()` until the next
        call, `engine.close()`.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        config: EngineConfig | None = None,
        policy: Policy | None = None,
        tokenizer: Tokenizer | None = None,
        *,
        max_prompt_tokens: int | None = None,
        pad_id: int = 0,
        warmup: bool = False,
    ):
        self.engine = Engine(model, params, config, policy, tokenizer)
        if warmup:
            executor = cast(JaxExecutor, self.engine.executor)
            executor.warmup(iter, transfers=self.engine.swaps)
        self._tokenizer = tokenizer
        self._max_prompt_tokens = max_prompt_tokens
        self._pad_id = pad_id
        self._served = Identity(params)

    def __call__(
        self,
        params: Params,
        prompts: Prompts,
        sampling: SamplingParams | None = None,
        *,
        mask: np.ndarray | jax.Array | None = None,
    ) -> Rollout:
        """Sample `sampling.n` outputs for each prompt.

        Weights are replaced as by `update`.

        The random streams are those of the prompts, whatever else is in the batch.
        Without `sampling.seed` they differ from call to call, and are the same for the
        same calls of an engine with the same `EngineConfig.seed`. With it they depend
        on the seed and the prompt's place in the call alone: give each call another.

        Args:
          prompts: of one length or many.
          sampling: its max_tokens is L. `logprobs` and `output_kind` are set here.
          mask: bool[prompts, P], of prompts in an array: which of it are tokens,
            whatever side the padding is on. None: all.

        Raises:
          ValueError: the weights do not fit, or a prompt cannot be served; the message
            says which, and none of the call's prompts runs.
          RuntimeError: the engine serves other requests.
        """
        sampling = SamplingParams() if sampling is None else sampling
        if sampling.max_tokens is None:
            raise ValueError(
                "max_tokens=None must be a number: the width of the arrays"
            )
        outputs = self.generate(params, prompts, sampling, mask=mask)
        width = self._max_prompt_tokens
        if width is None and isinstance(prompts, np.ndarray | jax.Array):
            width = prompts.shape[1]
        return padded(outputs, sampling.max_tokens, width, self._pad_id)

    def generate(
        self,
        params: Params,
        prompts: Prompts,
        sampling: SamplingParams | None = None,
        *,
        mask: np.ndarray | jax.Array | None = None,
    ) -> list[RequestOutput]:
        """The same as outputs, with texts and times; `padded` makes arrays of them."""
        sampling = SamplingParams() if sampling is None else sampling
        read_prompts = self._read(prompts, mask)
        if self.engine.has_unfinished_requests():
            raise RuntimeError("the engine serves other requests; finish them first")
        self.engine.restore_kv()
        self.update(params)
        return self._serve(read_prompts, _complete(sampling))

    def update(self, params: Params) -> int:
        """Serve with these weights from now on; returns their version.

        They are replaced where a leaf is another array than before: O(1), without a
        compilation, and nothing that the old ones cached is found again
        (`Engine.update_params`). JAX arrays are told apart by identity; numpy's, which
        can be written to, count as other ones each time.

        Raises:
          ValueError: the weights do not fit; nothing has changed.
        """
        identity = Identity(params)
        if identity != self._served:
            self.engine.update_params(params)
            self._served = identity
        return self.engine.weight_version

    def _read(
        self, prompts: Prompts, mask: np.ndarray | jax.Array | None
    ) -> list[ReadPrompt]:
        if isinstance(prompts, np.ndarray | jax.Array):
            rows = _unpadded(np.asarray(prompts), mask)
            forms: Sequence[Prompt] = [row.tolist() for row in rows]
        elif mask is not None:
            raise ValueError("mask must be None: prompts in a list have no padding")
        elif isinstance(prompts, str | Mapping) or not isinstance(prompts, Sequence):
            raise ValueError(
                f"prompts of type {type(prompts).__name__} must be a list of prompts, "
                "or an array of token ids; put a single prompt in a list"
            )
        else:
            forms = prompts
        if not len(forms):
            raise ValueError("prompts is empty; give at least one")
        found = [
            read(f"prompts[{i}]", form, self._tokenizer) for i, form in enumerate(forms)
        ]
        most = self._max_prompt_tokens
        for i, prompt in enumerate(found):
            if most is not None and len(prompt.token_ids) > most:
                raise ValueError(
                    f"prompts[{i}] has {len(prompt.token_ids)} tokens, which must not "
                    f"exceed max_prompt_tokens={most}; shorten it or raise that"
                )
        return found

    def _serve(
        self, prompts: Sequence[ReadPrompt], sampling: SamplingParams
    ) -> list[RequestOutput]:
        done: dict[str, RequestOutput] = {}
        try:
            for i, prompt in enumerate(prompts):
                self._submit(i, prompt, sampling)
            while len(done) < len(prompts):
                done |= {output.request_id: output for output in self.engine.step()}
        except BaseException:  # an interrupt too: a later call starts afresh
            for i in range(len(prompts)):
                self.engine.abort_request(str(i))
            self.engine.take_outputs()
            raise
        return [done[str(i)] for i in range(len(prompts))]

    def _submit(self, i: int, prompt: ReadPrompt, sampling: SamplingParams) -> None:
        if sampling.seed is not None:
            # Equal prompts of a call are to have streams of their own.
            own = random_seed(sampling.seed, i, None)
            sampling = dataclasses.replace(sampling, seed=own)
        try:
            self.engine.add_request(
                str(i),
                prompt.token_ids,
                sampling,
                cache_salt=prompt.cache_salt,
                prompt=prompt.text,
            )
        except ValueError as error:
            raise ValueError(f"prompts[{i}]: {error}") from None


def padded(
    outputs: Sequence[RequestOutput],
    max_tokens: int,
    max_prompt_tokens: int | None = None,
    pad_id: int = 0,
) -> Rollout:
    """Whole outputs, served with `logprobs`, as arrays of max_tokens columns.

    Args:
      max_prompt_tokens: P; None: the longest prompt's, rounded up to a power of two.

    Raises:
      ValueError: they are of several versions of the weights.
    """
    rows = [(output, one) for output in outputs for one in output.outputs]
    longest = max(len(output.prompt_token_ids) for output in outputs)
    width = max_prompt_tokens or 1 << (longest - 1).bit_length()
    prompts = np.full((len(rows), width), pad_id, np.int32)
    tokens = np.full((len(rows), max_tokens), pad_id, np.int32)
    logprobs = np.zeros(tokens.shape, np.float32)
    lengths, sampled = np.zeros((2, len(rows)), np.int32)
    for row, (output, one) in enumerate(rows):
        prompt, ids = output.prompt_token_ids, one.token_ids
        lengths[row], sampled[row] = len(prompt), len(ids)
        prompts[row, : len(prompt)] = prompt
        tokens[row, : len(ids)] = ids
        logprobs[row, : len(ids)] = [
            entry[token].logprob
            for token, entry in zip(ids, one.logprobs or (), strict=True)
        ]
    versions = {span.version for _, one in rows for span in one.weight_versions}
    if len(versions) != 1:
        raise ValueError(
            f"outputs are of the weight versions {sorted(versions)} and must be of "
            "one; make a rollout of each"
        )
    return Rollout(
        prompt_tokens=jnp.asarray(prompts),
        prompt_lengths=jnp.asarray(lengths),
        tokens=jnp.asarray(tokens),
        logprobs=jnp.asarray(logprobs),
        mask=jnp.asarray(np.arange(max_tokens) < sampled[:, None]),
        stopped=jnp.asarray([one.finish_reason == "stop" for _, one in rows]),
        weight_version=versions.pop(),
    )


def sequences(rollout: Rollout) -> jax.Array:
    """i32[B, P + L]: each row's prompt and, right behind it, its output; then padding.

    Pure: may be traced.
    """
    width = rollout.prompt_tokens.shape[1] + rollout.tokens.shape[1]
    at = jnp.arange(width)[None, :]
    lengths = rollout.prompt_lengths[:, None]
    joined = jnp.concatenate([rollout.prompt_tokens, rollout.tokens], axis=1)
    outputs = rollout.tokens.shape[1]
    # The prompt's own padding goes to the end.
    behind = jnp.where(
        at < lengths + outputs, at + width - outputs - lengths, at - outputs
    )
    source = jnp.where(at < lengths, at, behind)
    return jnp.take_along_axis(joined, source, axis=1)


def token_logprobs(
    model: Differentiable, params: Params, rollout: Rollout
) -> jax.Array:
    """f32[B, L]: the log-probability of each sampled token under `params`; 0 where
    there is none.

    What a learner differentiates: with the weights that sampled it, `rollout.logprobs`.
    Pure: may be traced, and differentiated by `params` in the model's plain layout.
    """
    steps = jnp.arange(rollout.tokens.shape[1])[None, :]
    positions = rollout.prompt_lengths[:, None] - 1 + steps  # of the token before
    logits = model.sequence_logits(params, sequences(rollout), positions)
    chosen = jnp.take_along_axis(logits, rollout.tokens[:, :, None], axis=2)[:, :, 0]
    logs = chosen - jax.nn.logsumexp(logits, axis=-1)
    return jnp.where(rollout.mask, logs, jnp.float32(0))


def _complete(sampling: SamplingParams) -> SamplingParams:
    """Whole outputs, with the log-probability of each token."""
    return dataclasses.replace(
        sampling, logprobs=sampling.logprobs or 0, output_kind="final_only"
    )


def _unpadded(
    prompts: np.ndarray, mask: np.ndarray | jax.Array | None
) -> list[np.ndarray]:
    if prompts.ndim != 2 or not np.issubdtype(prompts.dtype, np.integer):
        raise ValueError(
            f"prompts of {prompts.dtype}{list(prompts.shape)} must be integers "
            "[prompts, P], or a list of prompts"
        )
    if mask is None:
        return list(prompts)
    kept = np.asarray(mask)
    if kept.shape != prompts.shape:
        raise ValueError(
            f"mask of shape {kept.shape} must be of the prompts', {prompts.shape}"
        )
    return [row[keep] for row, keep in zip(prompts, kept.astype(bool), strict=True)]


class Identity:
    """Which arrays a pytree holds, without holding them.

    Weights in use are the engine's to hold; those that it has laid out anew would only
    take memory here.
    """

    def __init__(self, params: Params):
        leaves, self._structure = jax.tree.flatten(params)
        self._leaves = [_reference(leaf) for leaf in leaves]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Identity) or self._structure != other._structure:
            return False
        pairs = zip(self._leaves, other._leaves, strict=True)
        return all(mine() is not None and mine() is theirs() for mine, theirs in pairs)


def _reference(leaf: Any) -> Any:
    # Only what cannot be changed in place is the same as long as it is the same object.
    return weakref.ref(leaf) if isinstance(leaf, jax.Array) else lambda: None
