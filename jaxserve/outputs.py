"""What a caller gets back (vLLM's names and meanings). Plain values, numpy-free.

Owns the result types. Never sees the engine's own records.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jaxserve.metrics import RequestMetrics


@dataclasses.dataclass(frozen=True)
class Logprob:
    """Log-probability of one token at one position.

    Attributes:
      logprob: natural log of the unscaled distribution.
      rank: 1 = the likeliest.
      decoded_token: its text alone; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


class WeightSpan(NamedTuple):
    """Output tokens [start, end) that were sampled with one version of the weights."""

    version: int
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """One output of a request; with `output_kind="delta"`, what is new of it.

    Attributes:
      index: which of the request's outputs.
      text: the text so far; "" without a tokenizer. A stop string is cut off, unless
        it is to be included. Half a character, and what may be the start of a stop
        string, is held back.
      token_ids: output tokens so far; the stop token that ended it is the last.
      logprobs: for each output token, the likeliest tokens and the chosen one by id;
        None if they were not asked for.
      cumulative_logprob: the sum over all output tokens so far, in a delta too; None if
        log-probabilities were not asked for.
      finish_reason: "stop", "length" or "abort"; None while it runs.
      stop_reason: the stop string or the id from stop_token_ids that ended it; None for
        the model's own end-of-sequence id and for every other reason.
      weight_versions: which tokens were sampled with which version of the weights, in
        order; see `Engine.update_params`. Positions are of the whole output.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    cumulative_logprob: float | None
    finish_reason: str | None
    stop_reason: int | str | None
    weight_versions: list[WeightSpan] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """A request's outputs so far; with `output_kind="delta"`, what is new of them.

    Attributes:
      request_id, prompt_token_ids: as submitted.
      prompt: its text, where it was submitted as text.
      prompt_logprobs: for each prompt token but the first, which has None, as
        `CompletionOutput.logprobs`; None if they were not asked for, and until the
        whole prompt is computed. Deltas tell them once.
      outputs: of each of the `SamplingParams.n` samples.
      finished: nothing will change any more.
      num_cached_tokens: prompt tokens found in the prefix cache at first admission.
      metrics: its times, in seconds on the engine's clock; of several samples, those
        of the first with the tokens and preemptions of all.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics


def joined(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two deltas of a request, one after the other, as one."""
    completions = {completion.index: completion for completion in first.outputs}
    for new in second.outputs:
        old = completions.get(new.index)
        completions[new.index] = _joined(old, new) if old else new
    return dataclasses.replace(
        second,
        prompt_logprobs=second.prompt_logprobs or first.prompt_logprobs,
        outputs=list(completions.values()),
    )


def _joined(first: CompletionOutput, second: CompletionOutput) -> CompletionOutput:
    logprobs = second.logprobs
    if first.logprobs is not None and logprobs is not None:
        logprobs = first.logprobs + logprobs
    return dataclasses.replace(
        second,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=logprobs,
        weight_versions=_merged(first.weight_versions, second.weight_versions),
    )


def _merged(first: list[WeightSpan], second: list[WeightSpan]) -> list[WeightSpan]:
    """Spans one after the other; one that goes on is one."""
    if not (first and second and first[-1].version == second[0].version):
        return first + second
    whole = second[0]._replace(start=first[-1].start)
    return [*first[:-1], whole, *second[1:]]
