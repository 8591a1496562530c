"""Sampling of one request: how its tokens are chosen, and when it stops.

Owns the fields and the rules of each. Never sees a model, an engine or a request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from jaxserve.fields import flag, ids, integer, one_of, real, several, texts

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them would only round to a one-hot.
"""

_SEED_HINT = " and < 2**64, or None"
_BIAS_HINT = "; to exclude tokens, use allowed_token_ids or bad_words"


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it stops (vLLM's meanings).

    docs/sampling.md has the fields as a table, with the order in which they apply.

    Attributes:
      n: how many samples of the output to draw; the prompt is computed once, but for
        its last token. Each is a request of its own in all but its id.
      temperature: 0 (or anything under 1e-5) is greedy; else logits are divided by it.
        At most 1e6, which is as good as uniform: its inverse must stay a normal float.
      top_k: keep the k likeliest tokens; 0 and -1 keep all.
      top_p: keep the smallest set of tokens whose probability reaches top_p (nucleus
        sampling, Holtzman et al. 2020); 0 keeps the likeliest token alone.
      min_p: drop tokens less likely than min_p times the likeliest.
      seed: fixes the random stream; None derives one from the engine's seed and the
        order of submission. Either way the stream is keyed by position, so that batch
        mates, chunking and preemption do not change it.
      max_tokens: most output tokens; None allows all that max_model_len leaves.
      min_tokens: stop tokens cannot be drawn, nor stop strings end the text, before
        this many output tokens.
      stop: text(s) that end the output; the match is cut off.
      stop_token_ids: token ids that end the output, also under ignore_eos.
      ignore_eos: the model's own end-of-sequence ids do not stop this request.
      output_kind: what an output of the request holds. "cumulative": all tokens so far;
        "delta": those since its last output, so that all of them joined are the whole
        (`outputs.joined`); "final_only": nothing is told before it has ended.
      logprobs: how many of the likeliest tokens to report for each output token
        (natural log of the unscaled distribution); 0 reports the chosen one alone.
      prompt_logprobs: the same for each prompt token but the first. The whole prompt is
        then computed, whatever the prefix cache holds of it.
      presence_penalty: taken off the logit of every token in the output so far.
      frequency_penalty: taken off it once for each time that the token is there.
      repetition_penalty: divides the positive logits of the tokens in prompt and output
        so far, and multiplies the negative ones (Keskar et al. 2019); 1 is none.
      logit_bias: token id to what is added to its logit, from -100 to 100; kept as
        pairs in the order of the ids.
      allowed_token_ids: no other token is drawn; None allows all.
      bad_words: texts that the output does not contain, each as it is tokenized at the
        start of a text and after a space. Needs a tokenizer.
      detokenize: False leaves `text` empty, and saves its time; stop strings need it.
      skip_special_tokens: leave special tokens out of `text`.
      spaces_between_special_tokens: True alone is offered: a text is what the tokenizer
        makes of all tokens at once.
      include_stop_str_in_output: `text` ends with the stop string, or the text of the
        id, that ended it.
      skip_reading_prefix_cache: compute the whole prompt, whatever the prefix cache
        holds of it; what it computes is cached for others. None: as prompt_logprobs
        needs it.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    output_kind: Literal["cumulative", "delta", "final_only"] = "cumulative"
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    skip_reading_prefix_cache: bool | None = None

    def __post_init__(self) -> None:
        def put(field: str, value: object) -> None:
            object.__setattr__(self, field, value)

        put("n", integer("n", self.n, 1))
        greedy, keeps_all = "; 0 is greedy", "; 1 keeps all tokens"
        put(
            "temperature",
            real("temperature", self.temperature, 0.0, 1e6, greedy),
        )
        put(
            "top_k",
            integer("top_k", self.top_k, -1, "; 0 or -1 keeps all tokens"),
        )
        put("top_p", real("top_p", self.top_p, 0.0, 1.0, keeps_all))
        put("min_p", real("min_p", self.min_p, 0.0, 1.0, "; 0 keeps all tokens"))
        if self.seed is not None:
            put("seed", integer("seed", self.seed, -(2**63), _SEED_HINT))
            if self.seed >= 2**64:
                raise ValueError(f"seed={self.seed} must be an integer{_SEED_HINT}")
        if self.max_tokens is not None:
            hint = ", or None for no limit"
            put("max_tokens", integer("max_tokens", self.max_tokens, 1, hint))
        put("min_tokens", integer("min_tokens", self.min_tokens, 0))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} must not exceed "
                f"max_tokens={self.max_tokens}; lower it or raise max_tokens"
            )
        for field in ("logprobs", "prompt_logprobs"):
            value = getattr(self, field)
            if value is not None:
                put(field, integer(field, value, 0, ", or None for none"))
        for field in ("presence_penalty", "frequency_penalty"):
            put(
                field,
                real(field, getattr(self, field), -2.0, 2.0, "; 0 is none"),
            )
        # Its inverse must stay a normal float, and so must its product with a logit.
        field = "repetition_penalty"
        put(field, real(field, self.repetition_penalty, 1e-6, 1e6, "; 1 is none"))
        for field in (
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "include_stop_str_in_output",
        ):
            flag(field, getattr(self, field))
        if self.spaces_between_special_tokens is not True:
            raise ValueError(
                f"spaces_between_special_tokens={self.spaces_between_special_tokens!r} "
                "must be True: the text is the tokenizer's; decode token_ids yourself "
                "to have it otherwise"
            )
        if self.skip_reading_prefix_cache is not None:
            flag("skip_reading_prefix_cache", self.skip_reading_prefix_cache)
            if self.prompt_logprobs is not None and not self.skip_reading_prefix_cache:
                raise ValueError(
                    "skip_reading_prefix_cache=False must be None or True with "
                    f"prompt_logprobs={self.prompt_logprobs}, which needs the whole "
                    "prompt computed"
                )
        one_of("output_kind", self.output_kind, ("cumulative", "delta", "final_only"))
        # Hashable, and the caller's lists stay the caller's.
        text = (self.stop,) if isinstance(self.stop, str) else self.stop
        put("stop", texts("stop", text))
        put("bad_words", texts("bad_words", self.bad_words))
        put("stop_token_ids", ids("stop_token_ids", self.stop_token_ids) or None)
        put("logit_bias", _biases(self.logit_bias))
        if self.allowed_token_ids is not None:
            allowed = ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise ValueError(
                    "allowed_token_ids=[] must hold a token id; None allows all"
                )
            put("allowed_token_ids", tuple(sorted(set(allowed))))
        if self.stop and not self.detokenize:
            raise ValueError(
                f"detokenize=False must be True with stop={list(self.stop)!r}, which "
                "is looked for in the text; or use stop_token_ids"
            )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return tuple(self.stop or ())

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """`stop_token_ids` as a tuple."""
        return tuple(self.stop_token_ids or ())

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as a tuple of pairs."""
        return tuple(self.logit_bias or ())  # type: ignore[arg-type]

    @property
    def reads_cache(self) -> bool:
        """Whether it takes what others computed of its prompt."""
        if self.skip_reading_prefix_cache is not None:
            return not self.skip_reading_prefix_cache
        return self.prompt_logprobs is None

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < GREEDY_BELOW


def _biases(value: object) -> tuple[tuple[int, float], ...] | None:
    """`logit_bias` as pairs in the order of their ids, None for none, or ValueError."""
    if isinstance(value, Mapping):
        value = tuple(value.items())
    pairs: dict[int, float] = {}
    for pair in several("logit_bias", value, "a mapping from token id to bias"):
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise ValueError(f"logit_bias={pair!r} must map a token id to its bias")
        token = integer("logit_bias", pair[0], 0, ": a token id")
        field = f"logit_bias[{token}]"
        pairs[token] = real(field, pair[1], -100.0, 100.0, _BIAS_HINT)
    return tuple(sorted(pairs.items())) or None
