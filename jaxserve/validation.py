"""What the engine refuses at submission, before it has changed anything.

Owns the limits of one request. Every error names field, value, rule and remedy.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence

import numpy as np

from jaxserve.config import EngineConfig, EngineShape
from jaxserve.sampling_params import SamplingParams


def check_prompt(
    prompt: Sequence[int] | np.ndarray,
    vocab_size: int,
    config: EngineConfig,
    shape: EngineShape,
) -> list[int]:
    """The prompt as a list of ints, or ValueError."""
    if isinstance(prompt, str | bytes) or not isinstance(prompt, Sequence | np.ndarray):
        raise ValueError(
            f"prompt_token_ids of type {type(prompt).__name__} must be a sequence of "
            "token ids; encode text first, or use LLM.generate"
        )
    ids = prompt.tolist() if isinstance(prompt, np.ndarray) else list(prompt)
    if not isinstance(ids, list):
        raise ValueError(f"prompt_token_ids={prompt!r} must have one axis, not none")
    if not ids:
        raise ValueError("prompt_token_ids=[] must hold at least one token")
    checked = isinstance(prompt, np.ndarray) and (
        prompt.ndim == 1
        and np.issubdtype(prompt.dtype, np.integer)
        and 0 <= prompt.min()
        and prompt.max() < vocab_size
    )
    for i, token in enumerate(() if checked else ids):
        is_int = isinstance(token, numbers.Integral) and not isinstance(token, bool)
        if not is_int or not 0 <= token < vocab_size:
            raise ValueError(
                f"prompt_token_ids[{i}]={token!r} must be an integer in "
                f"[0, {vocab_size}), the model's vocabulary"
            )
    capacity = shape.num_blocks * shape.block_size
    if len(ids) > capacity:
        raise ValueError(
            f"the prompt has {len(ids)} tokens, but all {shape.num_blocks} KV blocks "
            f"together hold {capacity}; shorten it or raise num_blocks"
        )
    if len(ids) >= config.max_model_len:
        raise ValueError(
            f"the prompt has {len(ids)} tokens, which leaves no room for an output "
            f"within max_model_len={config.max_model_len}; shorten it or raise "
            "max_model_len"
        )
    return ids if checked else [int(token) for token in ids]


def output_limit(
    prompt_tokens: int,
    params: SamplingParams,
    config: EngineConfig,
    shape: EngineShape,
) -> int:
    """Most output tokens: max_tokens, within max_model_len and the blocks that exist.

    The last output token needs no KV row, hence the + 1.
    """
    capacity = shape.num_blocks * shape.block_size - prompt_tokens + 1
    limit = min(config.max_model_len - prompt_tokens, capacity)
    return limit if params.max_tokens is None else min(limit, params.max_tokens)


def check_params(
    params: SamplingParams, vocab_size: int, config: EngineConfig, *, has_text: bool
) -> None:
    """Refuse what this engine cannot honour.

    Args:
      has_text: the engine has a tokenizer.
    """
    if not isinstance(params, SamplingParams):
        raise ValueError(
            f"sampling_params of type {type(params).__name__} must be SamplingParams"
        )
    for field in ("logprobs", "prompt_logprobs"):
        value = getattr(params, field)
        if value is not None and value > config.max_logprobs:
            raise ValueError(
                f"{field}={value} must not exceed "
                f"max_logprobs={config.max_logprobs}; lower it or raise EngineConfig's"
            )
    if params.stop_strings and not has_text:
        raise ValueError(
            f"stop={list(params.stop_strings)!r} needs a tokenizer; give the engine "
            "one, or use stop_token_ids"
        )
    for token in params.stop_ids:
        if token >= vocab_size:
            raise ValueError(
                f"stop_token_ids={token} must be in [0, {vocab_size}), the vocabulary"
            )


def check_fork(
    params: SamplingParams, limit: int, *, of: SamplingParams, output_tokens: int
) -> None:
    """Refuse a fork that could not go on.

    Args:
      limit: most output tokens of the fork.
      of: parameters of the request that is forked.
      output_tokens: that it has.
    """
    if of.n > 1 or params.n > 1:
        raise ValueError(
            f"n={max(of.n, params.n)} must be 1 of a request that is forked, and of "
            "the fork; submit the samples as requests of their own"
        )
    if params.logprobs != of.logprobs:
        raise ValueError(
            f"logprobs={params.logprobs} must be {of.logprobs}, as of the request that "
            "is forked, whose output has no others"
        )
    if params.prompt_logprobs != of.prompt_logprobs:
        raise ValueError(
            f"prompt_logprobs={params.prompt_logprobs} must be {of.prompt_logprobs}, "
            "as of the request that is forked, whose prompt has no others"
        )
    if output_tokens >= limit:
        raise ValueError(
            f"max_tokens={params.max_tokens} allows {limit} output tokens, and the "
            f"request has {output_tokens} already; raise it"
        )


def stop_ids(
    params: SamplingParams, eos_ids: tuple[int, ...], shape: EngineShape
) -> tuple[int, ...]:
    """Ids that end the request: its own, and the model's unless it ignores them."""
    ids = set(params.stop_ids)
    ids |= set() if params.ignore_eos else set(eos_ids)
    if len(ids) > shape.max_stop_ids:
        raise ValueError(
            f"stop_token_ids and the model's own make {len(ids)} stop ids, which must "
            f"not exceed {shape.max_stop_ids}; drop some, or use stop strings"
        )
    return tuple(sorted(ids))


def check_terms(
    *,
    arrival_time: object,
    priority: object,
    user: object,
    deadline_s: object,
    tags: object,
    cache_salt: object,
) -> None:
    """Refuse what a policy or the prefix cache could not use."""
    for name, value in (("arrival_time", arrival_time), ("deadline_s", deadline_s)):
        if value is None:
            continue
        if not _is_finite(value):
            raise ValueError(f"{name}={value!r} must be a finite number of seconds")
    whole = isinstance(priority, numbers.Integral) and not isinstance(priority, bool)
    if not whole or not -(2**31) <= priority < 2**31:  # type: ignore[operator]
        raise ValueError(
            f"priority={priority!r} must be an integer of 32 bits; lower goes first"
        )
    if user is not None and not isinstance(user, str):
        raise ValueError(f"user={user!r} must be a string or None")
    if tags is not None and not (
        isinstance(tags, Mapping)
        and all(isinstance(k, str) and isinstance(v, str) for k, v in tags.items())
    ):
        raise ValueError(f"tags={tags!r} must map strings to strings")
    if cache_salt is not None and not _is_text(cache_salt):
        raise ValueError(
            f"cache_salt={cache_salt!r} must be a non-empty string of valid Unicode, "
            "or None to share cached blocks with every unsalted request"
        )


def _is_finite(value: object) -> bool:
    try:
        is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
        return is_real and math.isfinite(value)  # type: ignore[arg-type]
    except OverflowError:  # an integer past every float
        return False


def _is_text(value: object) -> bool:
    try:
        return isinstance(value, str) and value.encode() != b""
    except UnicodeEncodeError:  # half a surrogate pair
        return False
