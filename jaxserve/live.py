"""One sample's life towards its caller: text, reasons to stop, times.

Owns what a caller is told of it. Never sees a plan, a block or a slot's contents.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxserve.core import Event, Request, TokenLogprobs
from jaxserve.metrics import RequestMetrics, advance
from jaxserve.models.detokenizer import Decodes, Detokenizer, WithSpecialTokens
from jaxserve.outputs import CompletionOutput, Logprob, WeightSpan


class Live:
    """A request that has not ended, or just has: one sample of what a caller asked."""

    def __init__(
        self,
        request: Request,
        tokenizer: Decodes | None,
        weight_version: int = 0,
    ):
        self.request = request
        self._versions = [(0, weight_version)]  # first output token, of what weights
        self._metrics = RequestMetrics()  # all but the times of tokens
        self._times_s: list[float] = []
        params = request.params
        self._given = tokenizer
        if tokenizer and not params.skip_special_tokens:
            tokenizer = WithSpecialTokens(tokenizer)
        self._tokenizer = tokenizer
        self._text = ""
        self._stop_reason: int | str | None = None
        self._logprobs: list[dict[int, Logprob]] = []
        # Tokens and characters told in deltas. A stop string cuts neither: it takes
        # tokens of the launch that completes it, and text that was held back.
        self._told = (0, 0)
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._prompt_told = False
        self._detokenizer = None
        if tokenizer and params.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer,
                params.stop_strings,
                include_stop=params.include_stop_str_in_output,
            )

    def forked(self, request: Request) -> Live:
        """Of a fork of this request, which has its output so far."""
        live = Live(request, self._given)
        live._versions = list(self._versions)
        if live._detokenizer and request.output:
            live._text = live._detokenizer.push(request.output, may_stop=False)[0]
        return live

    @property
    def streams(self) -> bool:
        """Whether its caller is told of tokens before it ends."""
        return self.request.params.output_kind != "final_only"

    @property
    def metrics(self) -> RequestMetrics:
        """Its times and counts so far."""
        return dataclasses.replace(self._metrics, token_times_s=tuple(self._times_s))

    def note(self, event: Event) -> None:
        """Take in an event of this request, other than its progress."""
        self._metrics = advance(self._metrics, event)

    def took(self, times_s: Sequence[float]) -> None:
        """Take in output tokens that were read at these times."""
        self._times_s += times_s

    def weights_changed(self, version: int) -> None:
        """What is sampled from now on is of other weights."""
        self._versions.append((len(self.request.output), version))

    def _weight_spans(self, first: int) -> list[WeightSpan]:
        """Of the output tokens from `first` on."""
        tokens = len(self.request.output)
        starts = [max(start, first) for start, _ in self._versions]
        ends = [min(start, tokens) for start, _ in self._versions[1:]] + [tokens]
        versions = [version for _, version in self._versions]
        spans = map(WeightSpan, versions, starts, ends)
        return [span for span in spans if span.start < span.end]

    def absorb(self, first: int, stopped: bool) -> tuple[str | None, int]:
        """Decode the output tokens from `first` on.

        Returns the reason if the request ends here, and how many tokens a stop string
        cut off the end of its record.

        Args:
          stopped: the last token is one of the request's stop ids.
        """
        cut = self._decode(first, stopped)
        if cut is not None:
            return "stop", cut
        request = self.request
        if stopped:
            last = request.output[-1]
            asked = last in request.params.stop_ids
            self._stop_reason = last if asked else None
            return "stop", 0
        if len(request.output) >= request.max_output_tokens:
            return "length", 0
        return None, 0

    def _decode(self, first: int, stopped: bool) -> int | None:
        """Extend the text; tokens cut off if a stop string ended it, else None."""
        if self._detokenizer is None:
            return None
        request = self.request
        # The id that stops a request is no text, unless that is asked for.
        shown = not stopped or request.params.include_stop_str_in_output
        last = len(request.output) - (not shown)
        # min_tokens: that many tokens may not stop.
        free = max(first, min(last, request.params.min_tokens - 1))
        for start, end, may_stop in ((first, free, False), (free, last, True)):
            new = request.output[start:end]
            text, match = self._detokenizer.push(new, may_stop=may_stop)
            self._text += text
            if match is not None:
                cut = len(request.output) - match.num_tokens
                del request.output[match.num_tokens :]
                del request.logprobs[match.num_tokens :]
                self._stop_reason = match.stop
                return cut
        return None

    def finish(self) -> None:
        """The request ended: show what was held back, unless a stop string cut it."""
        if self._detokenizer and not isinstance(self._stop_reason, str):
            self._text += self._detokenizer.finish()

    def _record_logprobs(self) -> None:
        """Report the log-probabilities of the output tokens not reported yet."""
        for at in range(len(self._logprobs), len(self.request.logprobs)):
            token, entry = self.request.output[at], self.request.logprobs[at]
            self._logprobs.append(self._row(token, entry))

    def _row(self, token: int, entry: TokenLogprobs) -> dict[int, Logprob]:
        """The likeliest tokens at one position, and the one that is there."""
        row = {
            top: self._logprob(top, value, rank)
            for rank, (top, value) in enumerate(
                zip(entry.top_ids, entry.top, strict=True), start=1
            )
        }
        if token not in row:
            row[token] = self._logprob(token, entry.chosen, entry.rank)
        return row

    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """Log-probabilities of the prompt once they are all known; as a delta, once."""
        request = self.request
        if request.params.prompt_logprobs is None or self._prompt_told:
            return None
        tokens, entries = request.prompt[1:], request.computed.prompt_logprobs
        if self._prompt_logprobs is None and len(entries) == len(tokens):
            self._prompt_logprobs = [None, *map(self._row, tokens, entries)]
        self._prompt_told = (
            request.params.output_kind == "delta" and self._prompt_logprobs is not None
        )
        return self._prompt_logprobs

    def _logprob(self, token: int, value: float, rank: int) -> Logprob:
        text = self._tokenizer.decode([token]) if self._tokenizer else None
        return Logprob(value, rank, text)

    def completion(self, index: int) -> CompletionOutput:
        """What the caller is told now: all of it, or what no delta has told yet.

        Args:
          index: which of the request's samples it is.
        """
        request = self.request
        wanted = request.params.logprobs is not None
        if wanted:
            self._record_logprobs()
        tokens, characters = self._told
        if request.params.output_kind == "delta":
            self._told = len(request.output), len(self._text)
        return CompletionOutput(
            index=index,
            text=self._text[characters:],
            token_ids=request.output[tokens:],
            logprobs=self._logprobs[tokens:] if wanted else None,
            cumulative_logprob=(
                sum(entry.chosen for entry in request.logprobs) if wanted else None
            ),
            finish_reason=request.finish_reason,
            stop_reason=self._stop_reason if request.finish_reason == "stop" else None,
            weight_versions=self._weight_spans(tokens),
        )
