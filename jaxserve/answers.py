"""What a caller is told of one request: one output for each of its samples.

Owns the results. Never sees a plan, a block or a launch.
"""

from __future__ import annotations

import dataclasses

from jaxserve.live import Live
from jaxserve.metrics import RequestMetrics
from jaxserve.outputs import RequestOutput


class Answer:
    """The samples of one request, which the engine serves as requests of their own.

    Args:
      prompt: its text, where the caller gave one.
    """

    def __init__(self, prompt: str | None):
        self.lives: list[Live] = []
        self._prompt = prompt

    @property
    def index(self) -> int:
        """Submission index of the first sample."""
        return self.lives[0].request.index

    @property
    def finished(self) -> bool:
        """Whether every sample has ended."""
        return not any(self.alive())

    @property
    def told(self) -> bool:
        """Whether there is something to tell: all, or of one that streams, more."""
        return self.lives[0].streams or self.finished

    def alive(self) -> list[Live]:
        """The samples that have not ended."""
        return [live for live in self.lives if live.request.finish_reason is None]

    def add(self, live: Live) -> None:
        """Another sample."""
        self.lives.append(live)

    def output(self) -> RequestOutput:
        """What the caller is told now: all of it, or what no delta has told yet."""
        request = self.lives[0].request
        return RequestOutput(
            request_id=request.request_id,
            prompt=self._prompt,
            prompt_token_ids=list(request.prompt),
            prompt_logprobs=self.lives[0].prompt_logprobs(),
            outputs=[live.completion(i) for i, live in enumerate(self.lives)],
            finished=self.finished,
            num_cached_tokens=request.num_cached_tokens or 0,
            metrics=self._metrics(),
        )

    def _metrics(self) -> RequestMetrics:
        """Of the one sample; of several, the first's with the tokens of all."""
        first, *others = [live.metrics for live in self.lives]
        if not others:
            return first
        every = [first, *others]
        ends = [metrics.finished_s for metrics in every]
        return dataclasses.replace(
            first,
            finished_s=max(ends) if self.finished else None,  # type: ignore[type-var]
            token_times_s=tuple(sorted(t for m in every for t in m.token_times_s)),
            preemptions=sum(metrics.preemptions for metrics in every),
        )
