"""A request's stay in a slot, and a launch's memory of whom its rows served.

Owns the host's progress of one admission. Never decides anything.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jaxserve.core import Event, Request, StepPlan
from jaxserve.moves import STILL, Moves


@dataclasses.dataclass(slots=True)
class Running:
    """One admission of a request to a slot.

    Attributes:
      request, slot: who, and where until released.
      context: tokens to compute before sampling: the prompt, and for a resumed request
        the output it already had.
      planned: KV rows after every launch planned so far, at most.
      rows: KV rows after every launch read so far.
      cached: KV rows that it found in the prefix cache, in any tier.
      placed: number of the last plan that gave it a row, or took it in.
      sampling: output tokens allowed in launches not read yet.
      pending: KV rows that those launches may write.
      keys: chained keys of the leading full blocks of its known tokens.
      handles: pinned handles of its leading columns.
      doubles: columns that stay private, since their key is live under a block that
        others use; they pin that one's handle, so that the chain stays whole.
      weight_version: of the weights that its KV is computed with.
      complete: its answer is known, and waits for the rest of a static batch.
      released: the slot has been given back.
    """

    request: Request
    slot: int
    context: int
    planned: int
    rows: int
    cached: int
    keys: list[bytes]
    handles: list[int]
    placed: int
    doubles: set[int] = dataclasses.field(default_factory=set)
    sampling: int = 0
    pending: int = 0
    weight_version: int = 0
    complete: bool = False
    released: bool = False

    @property
    def prefilled(self) -> bool:
        """Whether all of the context is planned, so that it decodes next."""
        return self.planned >= self.context

    @property
    def known_rows(self) -> int:
        """KV rows that are written for sure, of tokens that are known."""
        if not self.prefilled:
            return self.planned
        return max(self.context, self.request.num_tokens - 1)

    @property
    def over(self) -> bool:
        """Whether it will sample no more: it ended, or all it may is planned."""
        if self.complete or self.request.finish_reason is not None:
            return True
        return self.prefilled and self.tokens_left == 0

    @property
    def tokens_left(self) -> int:
        """Output tokens that may still be planned."""
        output = len(self.request.output) + self.sampling
        return self.request.max_output_tokens - output


class Row(NamedTuple):
    """One row of a launch."""

    running: Running
    prompt_tokens: int
    steps: int
    scored: bool = False  # its prompt tokens' log-probabilities are asked for

    @property
    def new_rows(self) -> int:
        """KV rows that the launch may write for it, the bound the plan guaranteed."""
        if self.prompt_tokens:
            return self.prompt_tokens + max(self.steps - 1, 0)
        return self.steps


def progressed(
    running: Running, time_s: float, prompt_tokens: int, output_tokens: int
) -> Event:
    """The event that a request got on by so many tokens."""
    data = {
        "index": running.request.index,
        "slot": running.slot,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
    }
    return Event("progressed", time_s, running.request.request_id, data)


class Launch(NamedTuple):
    """A plan, and whom its rows serve, until its output is read."""

    plan: StepPlan
    rows: tuple[Row, ...]  # in the plan's order
    moves: Moves = STILL

    @property
    def who(self) -> list[int]:
        """Submission index of each row's request."""
        return [row.running.request.index for row in self.rows]
