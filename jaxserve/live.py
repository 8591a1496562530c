"""One request's life towards its caller: text, reasons to stop, times, results.

Owns what a caller is told. Never sees a plan, a block or a slot's contents.
"""

from __future__ import annotations

from typing import Protocol

from jaxserve.core import Event, Request
from jaxserve.metrics import RequestMetrics, advance
from jaxserve.outputs import CompletionOutput, Logprob, RequestOutput


class Decoder(Protocol):
    """What a tokenizer must offer an engine."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str: ...


class Live:
    """A request that has not ended, or just has."""

    def __init__(self, request: Request, tokenizer: Decoder | None, text: str | None):
        self.request = request
        self.metrics = RequestMetrics()
        self._tokenizer = tokenizer
        self._prompt_text = text
        self._text = ""
        self._stop_reason: int | str | None = None
        self._logprobs: list[dict[int, Logprob]] = []
        self._detokenizer = None

    def note(self, event: Event) -> None:
        """Take in an event of this request."""
        self.metrics = advance(self.metrics, event)

    def absorb(self, first: int, stopped: bool) -> str | None:
        """Decode the output tokens from `first` on; the reason if the request ends here.

        A stop string drops the tokens after it from the request's record.

        Args:
          stopped: the last token is one of the request's stop ids.
        """
        request = self.request
        new = request.output[first:]
        if self._detokenizer:
            hold = max(0, request.params.min_tokens - first)
            text = self._detokenizer
            shown = new[:-1] if stopped else new  # the id that stops it is no text
            match = text.push(shown, hold)
            if match is not None:
                del request.output[first + match.tokens :]
                del request.logprobs[first + match.tokens :]
                self._stop_reason = match.stop
                return "stop"
        if stopped:
            last = request.output[-1]
            asked = request.params.stop_token_ids or ()
            self._stop_reason = last if last in asked else None
            return "stop"
        if len(request.output) >= request.max_output_tokens:
            return "length"
        return None

    def record_logprobs(self) -> None:
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
            self.record_logprobs()
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
            prompt=self._prompt_text,
            prompt_token_ids=list(request.prompt),
            outputs=[completion],
            finished=request.finish_reason is not None,
            num_cached_tokens=request.num_cached_tokens or 0,
            metrics=self.metrics,
        )
