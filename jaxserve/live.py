"""One request's life towards its caller: text, reasons to stop, times, results.

Owns what a caller is told. Never sees a plan, a block or a slot's contents.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxserve.core import Event, Request
from jaxserve.metrics import RequestMetrics, advance
from jaxserve.models.detokenizer import Decodes, Detokenizer
from jaxserve.outputs import CompletionOutput, Logprob, RequestOutput


class Live:
    """A request that has not ended, or just has."""

    def __init__(self, request: Request, tokenizer: Decodes | None, prompt: str | None):
        self.request = request
        self._metrics = RequestMetrics()  # all but the times of tokens
        self._times_s: list[float] = []
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._text = ""
        self._stop_reason: int | str | None = None
        self._logprobs: list[dict[int, Logprob]] = []
        stop = request.params.stop_strings
        self._detokenizer = Detokenizer(tokenizer, stop) if tokenizer else None

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
        # The id that stops a request is no text.
        last = len(request.output) - stopped
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
            row = {
                top: self._logprob(top, value, rank)
                for rank, (top, value) in enumerate(
                    zip(entry.top_ids, entry.top, strict=True), start=1
                )
            }
            if token not in row:
                row[token] = self._logprob(token, entry.chosen, entry.rank)
            self._logprobs.append(row)

    def _logprob(self, token: int, value: float, rank: int) -> Logprob:
        text = self._tokenizer.decode([token]) if self._tokenizer else None
        return Logprob(value, rank, text)

    def output(self) -> RequestOutput:
        """What the caller is told now."""
        request = self.request
        wanted = request.params.logprobs is not None
        if wanted:
            self._record_logprobs()
        completion = CompletionOutput(
            index=0,
            text=self._text,
            token_ids=list(request.output),
            logprobs=list(self._logprobs) if wanted else None,
            finish_reason=request.finish_reason,
            stop_reason=self._stop_reason,
        )
        return RequestOutput(
            request_id=request.request_id,
            prompt=self._prompt,
            prompt_token_ids=list(request.prompt),
            outputs=[completion],
            finished=request.finish_reason is not None,
            num_cached_tokens=request.num_cached_tokens or 0,
            metrics=self.metrics,
        )
