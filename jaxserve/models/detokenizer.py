"""Text as tokens arrive: whole characters only, and stop strings that span tokens.

Owns what has been decoded but may not be shown yet. Never sees a request or a
checkpoint: it works with anything that has `decode(ids) -> str`.

All state is immutable values, so `copy.copy` forks a detokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

_BROKEN = "\ufffd"
_LATE = 3
"""A character has at most 4 bytes, so its first token waits for at most 3 more."""


class Decodes(Protocol):
    """What turns ids into text; bytes that are no UTF-8 become U+FFFD."""

    def decode(self, ids: Sequence[int], /) -> str:
        """The text of `ids`."""
        ...


class WithSpecialTokens:
    """Decodes special tokens as text too; for `skip_special_tokens=False`.

    Raises:
      ValueError: the tokenizer cannot.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        try:
            self.decode([])
        except TypeError:
            raise ValueError(
                "skip_special_tokens=False needs a tokenizer whose decode takes "
                "skip_special_tokens; give the engine such a one, or leave it True"
            ) from None

    def decode(self, ids: Sequence[int], /) -> str:
        """The text of `ids`."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class StopMatch(NamedTuple):
    """A stop string was found."""

    stop: str
    num_tokens: int  # of all tokens pushed, those up to the one that completed it


class Detokenizer:
    """The text of one output, delta by delta.

    The deltas and the rest, joined, are the decoding of all tokens at once, up to a
    stop string. A push decodes at most 8 tokens for each token that it takes. Text is
    at most 3 tokens late, and longer only while it may be the start of a stop string.
    An output that ends in half a character ends in exactly one U+FFFD.
    """

    def __init__(
        self,
        tokenizer: Decodes,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
    ) -> None:
        """Begin an output that ends before any of the `stop` strings (none empty), or
        with it if `include_stop`."""
        self._tokenizer = tokenizer
        self._stops = StopChecker(stop, include_stop=include_stop)
        self._num_tokens = 0
        # What is decoded at each step: `anchor` tokens of context, shown long ago, then
        # the tokens since the last character boundary. `skip` characters were shown.
        self._ids: tuple[int, ...] = ()
        self._context = 0
        self._skip = 0
        # The context keeps decoders that strip a leading space from stripping this one.
        self._anchor: tuple[int, ...] = ()
        self._anchor_text = ""
        self._shown = 0  # characters handed on so far
        self._known = (0,) * _LATE  # shown + held after each of the last pushes

    def push(
        self, token_ids: Sequence[int], *, may_stop: bool = True
    ) -> tuple[str, StopMatch | None]:
        """Take tokens, return the text that is now certain and the stop string it met.

        Tokens after the one that completes a stop string are dropped; nothing may be
        pushed then. With `may_stop` False (before min_tokens) a stop string that these
        tokens complete is let through; one that they only begin is still watched.
        """
        released = ""
        for token in token_ids:
            self._num_tokens += 1
            text, stop = self._stops.feed(self._decode_next(token), may_stop)
            released += text
            if stop is not None:
                return released, StopMatch(stop, self._num_tokens)
        return released, None

    def finish(self) -> str:
        """The text still held when the output ends without a stop string."""
        broken = _BROKEN if self._known[-1] > self._shown else ""
        text, _ = self._stops.feed(broken, may_stop=False)
        return text + self._stops.held

    def _decode_next(self, token: int) -> str:
        held = self._known[-1] - self._shown
        if len(self._ids) - self._context > _LATE:
            # No character boundary in sight: cut inside a character. What precedes the
            # held text decodes otherwise now, so count from the end.
            self._ids, self._context = self._ids[-_LATE:], 0
            self._skip = len(self._tokenizer.decode(self._ids)) - held
        self._ids += (token,)
        text = self._tokenizer.decode(self._ids)
        fresh = text[self._skip :]
        certain = len(fresh.rstrip(_BROKEN))
        overdue = self._known[0] - self._shown
        show = max(certain, min(overdue, len(fresh)))
        self._shown += show
        known = self._shown + len(fresh) - show
        # Byte tokens shrink as they join: three U+FFFD become one character.
        self._known = (*(min(seen, known) for seen in self._known[1:]), known)
        self._skip += show
        if show == len(fresh):
            self._start_at_boundary(text, fresh)
        return fresh[:show]

    def _start_at_boundary(self, text: str, fresh: str) -> None:
        """Forget the tokens shown, but keep some as context, best a single one."""
        alone = len(self._ids) - self._context == 1 and fresh != ""
        if alone and (self._anchor_text == "" or len(self._anchor) > 1):
            self._anchor = self._ids[-1:]
            self._anchor_text = self._tokenizer.decode(self._anchor)
        elif self._anchor_text == "":
            self._anchor, self._anchor_text = self._ids[-_LATE - 1 :], text
        self._ids, self._context = self._anchor, len(self._anchor)
        self._skip = len(self._anchor_text)


class StopChecker:
    """Finds stop strings in text that comes in pieces, holding back what may be one."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """Watch for `stops`; none may be empty."""
        if isinstance(stops, str) or not all(stops):
            raise ValueError(f"stop={stops!r} must be several non-empty strings")
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self.held = ""  # the end of the text so far, a proper prefix of a stop string

    def feed(self, text: str, may_stop: bool = True) -> tuple[str, str | None]:
        """Take a piece, return (text that is no part of a stop string, the match).

        Of several matches the one that is complete first wins, then the longest: what
        the same text would give one character at a time. The text before it is
        returned, with the match if it is to be included; what follows is cut off.
        """
        known = len(self.held)
        buffer = self.held + text
        found: list[tuple[int, int, str]] = []
        if may_stop:
            for stop in self._stops:
                at = buffer.find(stop, max(0, known - len(stop) + 1))
                if at >= 0:
                    found.append((at + len(stop), at, stop))
        if found:
            end, at, stop = min(found)
            self.held = ""
            return buffer[: end if self._include_stop else at], stop
        keep = max(
            (
                size
                for stop in self._stops
                for size in range(1, len(stop))
                if buffer.endswith(stop[:size])
            ),
            default=0,
        )
        cut = len(buffer) - keep
        self.held = buffer[cut:]
        return buffer[:cut], None
