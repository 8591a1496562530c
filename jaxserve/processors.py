"""What a request does to its logits before a token is drawn: the host's side.

Owns the tables of one slot as they cross to the device, and their limits. Never sees a
device array; `device/processors.py` applies them. Numpy only.

Axes: V vocabulary, K biased tokens, W bad words of several tokens each, G tokens of a
bad word, C columns of the context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxserve.config import LONGEST_BAD_WORD, EngineShape
from jaxserve.sampling_params import SamplingParams

Encode = Callable[[str], Sequence[int]]
"""A text's token ids, with no special token added."""


class Processors(NamedTuple):
    """What one request asks for; every default changes nothing."""

    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    mask: bytes = b""  # bit v % 8 of byte v // 8: v may be drawn; empty = all may
    bad_words: tuple[tuple[int, ...], ...] = ()  # of two or more tokens each


class Setup(NamedTuple):
    """The tables of a slot that is taken, written before the launch that admits it.

    The context is the host's to give: a cached prefix is in no launch of the request,
    and a resumed one comes with its output. What is drawn later the device adds.
    """

    slot: int
    prompt_tokens: int
    context: tuple[int, ...]  # token ids, prompt and output
    processors: Processors


def processors(
    params: SamplingParams,
    stop_ids: Sequence[int],
    vocab_size: int,
    shape: EngineShape,
    encode: Encode | None,
) -> Processors | None:
    """What a request asks for, or None if nothing.

    Args:
      stop_ids: what may not be drawn before min_tokens.
      encode: of the engine's tokenizer; None if it has none.

    Raises:
      ValueError: a limit is exceeded, or there may come to be no token to draw.
    """
    bias, allowed = params.biases, params.allowed_token_ids
    for name, ids in (
        ("logit_bias", [token for token, _ in bias]),
        ("allowed_token_ids", allowed or ()),
    ):
        for token in ids:
            if token >= vocab_size:
                raise ValueError(
                    f"{name} has the token id {token}, which must be in "
                    f"[0, {vocab_size}), the vocabulary"
                )
    if len(bias) > shape.max_logit_bias:
        raise ValueError(
            f"logit_bias has {len(bias)} tokens, which must not exceed "
            f"max_logit_bias={shape.max_logit_bias}; drop some or raise EngineConfig's"
        )
    words = _sequences(params.bad_words or (), encode)
    several = tuple(word for word in words if len(word) > 1)
    if len(several) > shape.max_bad_words:
        raise ValueError(
            f"bad_words come to {len(several)} sequences of two or more tokens, which "
            f"must not exceed max_bad_words={shape.max_bad_words}; drop some or raise "
            "EngineConfig's"
        )
    mask = b""
    if words or allowed is not None:
        mask = _mask(params, words, stop_ids, vocab_size)
    made = Processors(
        params.repetition_penalty,
        params.frequency_penalty,
        params.presence_penalty,
        tuple((token, value) for token, value in bias if value),
        mask,
        several,
    )
    return None if made == Processors() else made


def _mask(
    params: SamplingParams,
    words: Sequence[tuple[int, ...]],
    stop_ids: Sequence[int],
    vocab_size: int,
) -> bytes:
    """`Processors.mask` of the allowed tokens without the bad words of one token."""
    allowed = params.allowed_token_ids
    may = np.ones(vocab_size, bool)
    if allowed is not None:
        may[:] = False
        may[list(allowed)] = True
    may[[word[0] for word in words if len(word) == 1]] = False
    left = may.copy()
    left[[word[-1] for word in words]] = False
    if params.min_tokens:
        left[list(stop_ids)] = False
    if not left.any():
        raise ValueError(
            f"allowed_token_ids={_few(allowed)} leaves no token that is always "
            f"possible beside bad_words={list(params.bad_words or ())!r} and, before "
            f"min_tokens={params.min_tokens}, the stop ids {list(stop_ids)}; allow more"
        )
    return b"" if may.all() else np.packbits(may, bitorder="little").tobytes()


def _few(ids: Sequence[int] | None) -> str:
    if ids is None or len(ids) <= 8:
        return f"{ids if ids is None else list(ids)}"
    return f"[{', '.join(map(str, ids[:8]))}, ...]"


def _sequences(
    bad_words: Sequence[str], encode: Encode | None
) -> tuple[tuple[int, ...], ...]:
    """Token ids of each word, as it is at the start of a text and after a space."""
    if bad_words and encode is None:
        raise ValueError(
            f"bad_words={list(bad_words)!r} needs a tokenizer that encodes text; give "
            "the engine one, or use allowed_token_ids"
        )
    found: dict[tuple[int, ...], None] = {}
    for word in bad_words:
        assert encode is not None
        bare = word.lstrip()
        forms = {tuple(encode(text)) for text in (bare, f" {bare}") if bare}
        forms.discard(())
        if not forms:
            raise ValueError(
                f"bad_words={word!r} must come to a token that is more than space"
            )
        for ids in sorted(forms):
            if len(ids) > LONGEST_BAD_WORD:
                raise ValueError(
                    f"bad_words={word!r} comes to {len(ids)} tokens, which must not "
                    f"exceed {LONGEST_BAD_WORD}; a part of it will do"
                )
            found[ids] = None
    return tuple(found)


def setup_fields(shape: EngineShape, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Shape of each field of a slot's settings, in 32-bit words, in their order."""
    return {
        "prompt_tokens": (1,),
        "penalties": (3,),  # f32 bits: repetition, frequency, presence
        "bias_ids": (shape.max_logit_bias,),  # i32[K]; padding: V
        "biases": (shape.max_logit_bias,),  # f32[K] bits
        "mask": (-(-vocab_size // 32),),  # bit v % 32 of word v // 32: may be drawn
        # i32[W, G] right-aligned; padding: -1
        "bad_words": (shape.max_bad_words, LONGEST_BAD_WORD),
    }


def context_columns(shape: EngineShape) -> int:
    """C, the most tokens of a sequence: what a slot's blocks hold."""
    return shape.max_blocks_per_slot * shape.block_size


def pack_setup(setup: Setup, shape: EngineShape, vocab_size: int) -> np.ndarray:
    """A setup as one i32 vector, so that it is one transfer: slot, settings, context
    (anything behind its end)."""
    made = setup.processors
    fields = {
        name: np.zeros(dims, np.int32)
        for name, dims in setup_fields(shape, vocab_size).items()
    }
    fields["prompt_tokens"][0] = setup.prompt_tokens
    fields["penalties"][:] = np.array(made[:3], np.float32).view(np.int32)
    fields["bias_ids"][:] = vocab_size
    if made.logit_bias:
        ids, values = zip(*made.logit_bias, strict=True)
        fields["bias_ids"][: len(ids)] = ids
        fields["biases"][: len(ids)] = np.array(values, np.float32).view(np.int32)
    fields["mask"][:] = -1
    if made.mask:
        bits = fields["mask"].view(np.uint8)
        bits[: len(made.mask)] = np.frombuffer(made.mask, np.uint8)
    fields["bad_words"][:] = -1
    for row, word in zip(fields["bad_words"], made.bad_words, strict=False):
        row[-len(word) :] = word
    context = np.zeros(context_columns(shape), np.int32)
    context[: len(setup.context)] = setup.context
    settings = [field.reshape(-1) for field in fields.values()]
    return np.concatenate([np.array([setup.slot], np.int32), *settings, context])
