"""What a caller gets back (vLLM's names and meanings). Plain values, numpy-free.

Owns the result types. Never sees the engine's own records.
"""

from __future__ import annotations

import dataclasses

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


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """One output of a request.

    Attributes:
      index: which of the request's outputs.
      text: the text so far; "" without a tokenizer. A stop string is cut off.
      token_ids: output tokens so far; the stop token that ended it is the last.
      logprobs: for each output token, the likeliest tokens and the chosen one by id;
        None if they were not asked for.
      finish_reason: "stop", "length" or "abort"; None while it runs.
      stop_reason: the stop string or the id from stop_token_ids that ended it; None for
        the model's own end-of-sequence id and for every other reason.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """A request's outputs so far.

    Attributes:
      request_id, prompt_token_ids: as submitted.
      prompt: its text, where it was submitted as text.
      outputs: one `CompletionOutput`.
      finished: nothing will change any more.
      num_cached_tokens: prompt tokens found in the prefix cache at first admission.
      metrics: its times, in seconds on the engine's clock.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics
