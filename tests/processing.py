"""What a request's fields do to its logits, by their definition: token by token.

The oracle of the tests; `jaxserve/device/processors.py` must do the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from jaxserve import SamplingParams

NEUTRAL = (1.0, 0.0, 0.0)  # repetition, frequency and presence penalty


class Numbers:
    """A tokenizer whose words are token ids: "5 17" is the ids 5 and 17."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """5 and 6 are special tokens."""
        kept = [t for t in ids if not skip_special_tokens or t not in (5, 6)]
        return "".join(f"{token} " for token in kept)


NUMBERS = Numbers()


def process(
    logits: np.ndarray,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    penalties: tuple[float, float, float] = NEUTRAL,
    bias: Mapping[int, float] | None = None,
    allowed: Iterable[int] | None = None,
    bad_words: Sequence[Sequence[int]] = (),
    barred: Iterable[int] = (),
) -> np.ndarray:
    """The logits f32[V] that a token is drawn from.

    Args:
      barred: stop ids before min_tokens.
    """
    x = np.array(logits, np.float32)
    output = list(output)
    for token in set(range(len(x))) - set(
        range(len(x)) if allowed is None else allowed
    ):
        x[token] = -np.inf
    for *start, last in bad_words:
        if output[len(output) - len(start) :] == start:
            x[last] = -np.inf
    for token in barred:
        x[token] = -np.inf
    for token, value in (bias or {}).items():
        x[token] += np.float32(value)
    repetition, frequency, presence = map(np.float32, penalties)
    for token in {*prompt, *output}:
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
        count = output.count(token)
        x[token] -= frequency * np.float32(count)
        if count:
            x[token] -= presence
    return x


def process_as(
    params: SamplingParams,
    logits: np.ndarray,
    prompt: Sequence[int],
    output: Sequence[int],
    encode: Callable[[str], list[int]] = NUMBERS.encode,
) -> np.ndarray:
    """`process`, as the parameters say; bad words are those of `encode`."""
    return process(
        logits,
        prompt,
        output,
        penalties=(
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        ),
        bias=dict(params.biases),
        allowed=params.allowed_token_ids,
        bad_words=[encode(word) for word in params.bad_words or ()],
    )


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Float64 log-probabilities."""
    x = np.asarray(logits, np.float64)
    return x - np.log(np.exp(x).sum())


def random_fields(rng: random.Random, vocab: int = 97) -> dict:
    """Fields of a request, perhaps none; values of few bits, so that sums are exact."""
    fields: dict = {}
    if rng.random() < 0.4:
        fields["repetition_penalty"] = rng.choice([0.5, 1.0, 2.0, 4.0])
        fields["frequency_penalty"] = rng.choice([-2.0, -0.5, 0.0, 0.5, 2.0])
        fields["presence_penalty"] = rng.choice([-2.0, 0.0, 1.0, 2.0])
    if rng.random() < 0.3:
        values = (-100.0, -3.0, 2.5, 5.0)
        count = rng.randint(1, 5)
        fields["logit_bias"] = {
            rng.randrange(vocab): rng.choice(values) for _ in range(count)
        }
    words = list(range(vocab))
    if rng.random() < 0.3:
        words = sorted(rng.sample(words, min(rng.choice([6, 12, 40]), vocab)))
        fields["allowed_token_ids"] = words
    if rng.random() < 0.3:
        last = words[: len(words) // 2]  # the others are always possible
        fields["bad_words"] = [
            " ".join(map(str, [*rng.choices(words, k=before), rng.choice(last)]))
            for before in rng.choices([0, 1, 1, 2, 15], k=rng.choice([1, 9]))
        ]
    if rng.random() < 0.2:
        fields["min_tokens"] = rng.choice([1, 4, 9])
    if rng.random() < 0.2:
        fields["prompt_logprobs"] = rng.choice([0, 1])
    elif rng.random() < 0.1:
        fields["skip_reading_prefix_cache"] = True
    return fields
