"""From what a caller asks to a request: what cannot be served is refused.

Owns the limits and terms of new requests, and how forks are made. Changes nothing:
never sees the scheduler or an executor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from jaxserve import validation
from jaxserve.config import EngineConfig, EngineShape
from jaxserve.core import Request, forked
from jaxserve.models.base import Model
from jaxserve.models.detokenizer import Decodes
from jaxserve.processors import Processors, processors
from jaxserve.sampling_params import SamplingParams


class Intake(NamedTuple):
    """What the requests of one engine are checked against.

    Attributes:
      model: its vocabulary and stop ids. tokenizer: reads texts in parameters.
      config, shape: of the engine.
    """

    model: Model
    tokenizer: Decodes | None
    config: EngineConfig
    shape: EngineShape

    def request(
        self,
        request_id: str,
        index: int,
        prompt_token_ids: Sequence[int] | np.ndarray,
        params: SamplingParams,
        *,
        now_s: float,
        arrival_time: float | None,
        priority: int,
        user: str | None,
        deadline_s: float | None,
        tags: Mapping[str, str] | None,
        cache_salt: str | None,
        text: str | None,
    ) -> Request:
        """A new request; the arguments are those of `Engine.add_request`.

        Args:
          index: its submission index.

        Raises:
          ValueError: it cannot be served.
        """
        vocab = self.model.vocab_size
        ids = validation.check_prompt(prompt_token_ids, vocab, self.config, self.shape)
        self.check(params)
        validation.check_terms(
            arrival_time=arrival_time,
            priority=priority,
            user=user,
            deadline_s=deadline_s,
            tags=tags,
            cache_salt=cache_salt,
        )
        stop_ids = self._stop_ids(params)
        return Request(
            request_id,
            index,
            ids,
            params,
            max_output_tokens=self._limit(ids, params),
            stop_ids=stop_ids,
            arrival_s=now_s if arrival_time is None else float(arrival_time),
            priority=int(priority),
            user=user,
            deadline_s=deadline_s,
            tags=tags,
            cache_salt=cache_salt,
            text=text,
            processors=self._processors(params, stop_ids),
        )

    def sample(self, request: Request, index: int) -> Request:
        """Another sample of a request that has not begun."""
        return self._forked(request, request.request_id, index, request.params)

    def fork(
        self, request: Request, new_id: str, index: int, params: SamplingParams
    ) -> Request:
        """A request that goes on from where another is, all of whose launches are read.

        Raises:
          ValueError: it could not go on.
        """
        self.check(params)
        validation.check_fork(
            params,
            self._limit(request.prompt, params),
            of=request.params,
            output_tokens=len(request.output),
        )
        return self._forked(request, new_id, index, params)

    def check(self, params: SamplingParams) -> None:
        """Refuse parameters that this engine cannot honour."""
        has_text = self.tokenizer is not None
        vocab = self.model.vocab_size
        validation.check_params(params, vocab, self.config, has_text=has_text)

    def _forked(
        self, request: Request, new_id: str, index: int, params: SamplingParams
    ) -> Request:
        limit, stops = self._limit(request.prompt, params), self._stop_ids(params)
        made = self._processors(params, stops)
        return forked(request, new_id, index, params, limit, stops, made)

    def _limit(self, prompt: Sequence[int], params: SamplingParams) -> int:
        return validation.output_limit(len(prompt), params, self.config, self.shape)

    def _stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        return validation.stop_ids(params, self.model.eos_ids, self.shape)

    def _processors(
        self, params: SamplingParams, stop_ids: tuple[int, ...]
    ) -> Processors | None:
        encode = getattr(self.tokenizer, "encode", None)
        if encode:  # a part of a text
            encode = partial(encode, add_special_tokens=False)
        vocab = self.model.vocab_size
        return processors(params, stop_ids, vocab, self.shape, encode)
