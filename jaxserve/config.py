"""What a user may set: sampling of one request, and the shape of one engine.

Owns the validation of every field (each error names field, value, rule and remedy) and
the list of compiled launch shapes. Never sees a model, a device array or a request.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them would only round to a one-hot.
"""

LONGEST_BAD_WORD = 16
"""Tokens of a bad word, at most: the device looks back as far."""


_SEED_HINT = " and < 2**64, or None"


def _integer(field: str, value: object, low: int, hint: str = "") -> int:
    """The value as an int, or ValueError."""
    is_int = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_int or int(value) < low:  # type: ignore[call-overload]
        raise ValueError(f"{field}={value!r} must be an integer >= {low}{hint}")
    return int(value)  # type: ignore[call-overload]


def _real(field: str, value: object, low: float, high: float, hint: str = "") -> float:
    """The value as a float, or ValueError; NaN is in no range."""
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_real or not low <= value <= high:  # type: ignore[operator]
        span = f"[{low:g}, {high:g}]"
        raise ValueError(f"{field}={value!r} must be a number in {span}{hint}")
    return float(value)  # type: ignore[arg-type]


def _one_of(field: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{field}={value!r} must be one of {list(known)}")


def _flag(field: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{field}={value!r} must be True or False")


def _several(field: str, value: object, what: str) -> tuple:
    """A collection's items, none for None, or ValueError."""
    if value is None:
        return ()
    if not isinstance(value, Iterable) or isinstance(value, str):
        raise ValueError(f"{field}={value!r} must be {what}, or None")
    return tuple(value)


def _texts(field: str, value: object) -> tuple[str, ...] | None:
    """A collection of non-empty strings, None for none, or ValueError."""
    texts = _several(field, value, "a non-empty string, or several")
    for one in texts:
        if not isinstance(one, str) or not one:
            raise ValueError(f"{field}={one!r} must be a non-empty string, or several")
    return texts or None


def _ids(field: str, value: object) -> tuple[int, ...]:
    """A collection of token ids, or ValueError."""
    ids = _several(field, value, "several, each an integer >= 0")
    return tuple(_integer(field, token, 0) for token in ids)


def _biases(value: object) -> tuple[tuple[int, float], ...] | None:
    """`logit_bias` as pairs in the order of their ids, None for none, or ValueError."""
    if isinstance(value, Mapping):
        value = tuple(value.items())
    pairs: dict[int, float] = {}
    for pair in _several("logit_bias", value, "a mapping from token id to bias"):
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise ValueError(f"logit_bias={pair!r} must map a token id to its bias")
        token = _integer("logit_bias", pair[0], 0, ": a token id")
        field = f"logit_bias[{token}]"
        pairs[token] = _real(field, pair[1], -100.0, 100.0, _BIAS_HINT)
    return tuple(sorted(pairs.items())) or None


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

        put("n", _integer("n", self.n, 1))
        greedy, keeps_all = "; 0 is greedy", "; 1 keeps all tokens"
        put("temperature", _real("temperature", self.temperature, 0.0, 1e6, greedy))
        put("top_k", _integer("top_k", self.top_k, -1, "; 0 or -1 keeps all tokens"))
        put("top_p", _real("top_p", self.top_p, 0.0, 1.0, keeps_all))
        put("min_p", _real("min_p", self.min_p, 0.0, 1.0, "; 0 keeps all tokens"))
        if self.seed is not None:
            put("seed", _integer("seed", self.seed, -(2**63), _SEED_HINT))
            if self.seed >= 2**64:
                raise ValueError(f"seed={self.seed} must be an integer{_SEED_HINT}")
        if self.max_tokens is not None:
            hint = ", or None for no limit"
            put("max_tokens", _integer("max_tokens", self.max_tokens, 1, hint))
        put("min_tokens", _integer("min_tokens", self.min_tokens, 0))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} must not exceed "
                f"max_tokens={self.max_tokens}; lower it or raise max_tokens"
            )
        for field in ("logprobs", "prompt_logprobs"):
            value = getattr(self, field)
            if value is not None:
                put(field, _integer(field, value, 0, ", or None for none"))
        for field in ("presence_penalty", "frequency_penalty"):
            put(field, _real(field, getattr(self, field), -2.0, 2.0, "; 0 is none"))
        # Its inverse must stay a normal float, and so must its product with a logit.
        field = "repetition_penalty"
        put(field, _real(field, self.repetition_penalty, 1e-6, 1e6, "; 1 is none"))
        for field in (
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "include_stop_str_in_output",
        ):
            _flag(field, getattr(self, field))
        if self.spaces_between_special_tokens is not True:
            raise ValueError(
                f"spaces_between_special_tokens={self.spaces_between_special_tokens!r} "
                "must be True: the text is the tokenizer's; decode token_ids yourself "
                "to have it otherwise"
            )
        if self.skip_reading_prefix_cache is not None:
            _flag("skip_reading_prefix_cache", self.skip_reading_prefix_cache)
            if self.prompt_logprobs is not None and not self.skip_reading_prefix_cache:
                raise ValueError(
                    "skip_reading_prefix_cache=False must be None or True with "
                    f"prompt_logprobs={self.prompt_logprobs}, which needs the whole "
                    "prompt computed"
                )
        _one_of("output_kind", self.output_kind, ("cumulative", "delta", "final_only"))
        # Hashable, and the caller's lists stay the caller's.
        text = (self.stop,) if isinstance(self.stop, str) else self.stop
        put("stop", _texts("stop", text))
        put("bad_words", _texts("bad_words", self.bad_words))
        put("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids) or None)
        put("logit_bias", _biases(self.logit_bias))
        if self.allowed_token_ids is not None:
            allowed = _ids("allowed_token_ids", self.allowed_token_ids)
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


def bucket(value: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `value`; the one rule for warm-up and run time."""
    for size in buckets:
        if value <= size:
            return size
    raise ValueError(f"{value} exceeds the largest bucket of {tuple(buckets)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineShape:
    """The static sizes of one engine: everything that decides an array's shape.

    Attributes:
      num_blocks: P, blocks of KV memory.
      block_size: B, tokens a block.
      max_slots: S, requests that run at once.
      max_blocks_per_slot: M, columns of a slot's block list.
      decode_steps: N, most steps a launch.
      max_edits: K, most block edits of each kind a launch.
      num_handles: H, names for cached blocks. More than P, since a handle retired in a
        plan is not reused in it.
      max_logprobs: W, likeliest tokens reported a step.
      max_stop_ids: E, token ids that stop one request.
      max_logit_bias: biased tokens of one request.
      max_bad_words: bad words of two or more tokens, of one request.
      row_buckets: sizes of the row axis R, ascending; the last is max_slots or more.
      token_buckets: sizes of the token axis T of the mixed step, ascending.
    """

    num_blocks: int
    block_size: int
    max_slots: int
    max_blocks_per_slot: int
    decode_steps: int
    max_edits: int
    num_handles: int
    max_logprobs: int
    max_stop_ids: int
    max_logit_bias: int
    max_bad_words: int
    row_buckets: tuple[int, ...]
    token_buckets: tuple[int, ...]

    def blocks(self, tokens: int) -> int:
        """How many blocks `tokens` KV rows fill, the last one perhaps in part."""
        return -(-tokens // self.block_size)

    def launch_shape(self, rows: int, tokens: int) -> tuple[int, int]:
        """(R, T) of the launch that holds `rows` rows and `tokens` mixed-step tokens.

        T = 0 is the launch that only edits blocks; it comes in the largest R alone. One
        token alone has a shape of its own: who serves one request waits for each token.
        """
        if tokens == 0:
            return self.row_buckets[-1], 0
        if rows <= 1 and tokens <= 1:
            return 1, 1
        r = bucket(rows, self.row_buckets)
        return r, max(r, bucket(tokens, self.token_buckets))

    @property
    def transfer_buckets(self) -> tuple[int, ...]:
        """Blocks that one program copies to or from the host, ascending."""
        most = min(64, self.max_blocks_per_slot)
        return _ladder(min(8, most), most, 8)

    def launch_shapes(self) -> tuple[tuple[int, int], ...]:
        """Every (R, T) that `launch_shape` can return: the whole compiled set."""
        mixed = {(r, max(r, t)) for r in self.row_buckets for t in self.token_buckets}
        return ((self.row_buckets[-1], 0), *sorted({(1, 1), *mixed}))


def _ladder(low: int, high: int, factor: int) -> tuple[int, ...]:
    sizes = []
    while low < high:
        sizes.append(low)
        low *= factor
    return (*sizes, high)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What one engine is asked for; frozen, validated, hashable.

    Attributes:
      max_model_len: most tokens of prompt and output together.
      max_num_seqs: most requests running at once.
      max_num_batched_tokens: token budget of a step: decode rows and prompt tokens.
      block_size: tokens of a KV block; a power of two.
      num_blocks: KV blocks; None takes what max_num_seqs sequences of full length need,
        within `cache_bytes`.
      cache_bytes: bound on the KV cache when num_blocks is None.
      enable_prefix_caching: share the blocks of equal prompt prefixes.
      preemption_mode: what becomes of the KV of a request that loses its slot.
        "recompute" forgets it, but for blocks that stay cached; "swap" keeps it on the
        host, as far as there is room, else on disk; "disk" keeps it on disk; "auto"
        does what costs least time by the engine's own measurements, and "article" by a
        rule of thumb kept for study (see scheduling/preemption.py).
      swap_space_bytes: bound on host memory for swapped requests; what they leave of it
        holds cached blocks.
      num_swap_blocks: the same bound in blocks; None takes what swap_space_bytes holds.
      disk_cache_dir: directory for KV blocks; engines may share it, and it outlives
        them.
      disk_cache_bytes: bound on the files there that this model can read.
      num_disk_blocks: the same bound in blocks; None takes what disk_cache_bytes holds.
      tier_write: when a cached block is copied to the tier below, host or disk:
        "on_eviction" of it, "through" as soon as it is full, which survives a crash, or
        "never".
      tier_eviction: which cached block leaves a full tier: the least recently used
        ("lru"), the least often used ("lfu"), or the one cheapest to compute again a
        byte ("cost"); always children before parents.
      transfer_timeout_s: how long a request waits for blocks from host or disk before
        it is computed instead.
      num_scheduler_steps: decode steps a launch (N-step scheduling).
      launches_in_flight: launches submitted before the oldest is read; 1 is
        synchronous.
      max_chunk_tokens: most prompt tokens of one request in a step; None is no cap.
      batching: "continuous" lets requests join and leave at every launch (Orca, Yu et
        al. 2022). "static" is the baseline: a batch starts when the engine is idle,
        admits only what fits to its end, computes all prompts first, takes nobody in,
        and gives answers and slots back when its longest request ends.
      prefill: who shares a step under continuous batching. "chunked": prompts and
        decodes, in rank order within the token budget. "decode_first": decodes first,
        prompts in what budget they leave (Sarathi-Serve, Agrawal et al. 2024).
        "prefill_first": prompts alone as long as any can be computed; decodes stall.
      skip_limit: how often requests may pass one that waits for memory.
      seed: of the random streams of unseeded requests.
      max_logprobs: the largest `logprobs` and `prompt_logprobs` of a request accepted.
      max_logit_bias: most tokens in a request's `logit_bias`.
      max_bad_words: most token sequences of two or more tokens that a request's
        `bad_words` come to. Single tokens are not counted.
    """

    max_model_len: int = 2048
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    block_size: int = 16
    num_blocks: int | None = None
    cache_bytes: int = 2**30
    enable_prefix_caching: bool = True
    preemption_mode: Literal["recompute", "swap", "disk", "auto", "article"] = "auto"
    swap_space_bytes: int = 0
    num_swap_blocks: int | None = None
    disk_cache_dir: str | None = None
    disk_cache_bytes: int = 0
    num_disk_blocks: int | None = None
    tier_write: Literal["never", "on_eviction", "through"] = "on_eviction"
    tier_eviction: Literal["lru", "lfu", "cost"] = "lru"
    transfer_timeout_s: float = 30.0
    num_scheduler_steps: int = 1
    launches_in_flight: int = 1
    max_chunk_tokens: int | None = None
    batching: Literal["continuous", "static"] = "continuous"
    prefill: Literal["chunked", "prefill_first", "decode_first"] = "chunked"
    skip_limit: int = 0
    seed: int = 0
    max_logprobs: int = 20
    max_logit_bias: int = 300
    max_bad_words: int = 128

    def __post_init__(self) -> None:
        lowest = {
            "max_model_len": 2,
            "max_num_seqs": 1,
            "max_num_batched_tokens": 1,
            "block_size": 1,
            "num_blocks": 1,
            "cache_bytes": 1,
            "swap_space_bytes": 0,
            "num_swap_blocks": 0,
            "disk_cache_bytes": 0,
            "num_disk_blocks": 0,
            "num_scheduler_steps": 1,
            "launches_in_flight": 1,
            "max_chunk_tokens": 1,
            "skip_limit": 0,
            "seed": 0,
            "max_logprobs": 0,
            "max_logit_bias": 0,
            "max_bad_words": 0,
        }
        hints = {"max_model_len": ": a prompt and an output"}
        hints |= dict.fromkeys(
            ("num_blocks", "num_swap_blocks", "num_disk_blocks", "max_chunk_tokens"),
            ", or None",
        )
        for field, low in lowest.items():
            value = getattr(self, field)
            hint = hints.get(field, "")
            if value is not None or not hint.endswith("None"):
                object.__setattr__(self, field, _integer(field, value, low, hint))
        _flag("enable_prefix_caching", self.enable_prefix_caching)
        modes = ("recompute", "swap", "disk", "auto", "article")
        _one_of("preemption_mode", self.preemption_mode, modes)
        _one_of("tier_write", self.tier_write, ("never", "on_eviction", "through"))
        _one_of("tier_eviction", self.tier_eviction, ("lru", "lfu", "cost"))
        timeout_s = _real("transfer_timeout_s", self.transfer_timeout_s, 0.0, 1e6)
        object.__setattr__(self, "transfer_timeout_s", timeout_s)
        if self.disk_cache_dir is not None and not isinstance(self.disk_cache_dir, str):
            raise ValueError(
                f"disk_cache_dir={self.disk_cache_dir!r} must be a path, a string, or "
                "None"
            )
        if self.disk_cache_bytes and self.disk_cache_dir is None:
            raise ValueError(
                f"disk_cache_bytes={self.disk_cache_bytes} needs a disk_cache_dir to "
                "write to"
            )
        _one_of("batching", self.batching, ("continuous", "static"))
        _one_of("prefill", self.prefill, ("chunked", "prefill_first", "decode_first"))
        if self.batching == "static" and self.prefill != "chunked":
            raise ValueError(
                f"prefill={self.prefill!r} must be 'chunked' with batching='static', "
                "which computes all prompts of a batch before it decodes"
            )
        if self.block_size & (self.block_size - 1):
            low = 1 << (self.block_size.bit_length() - 1)
            raise ValueError(
                f"block_size={self.block_size} must be a power of two; "
                f"nearest are {low} and {2 * low}"
            )
        if self.launches_in_flight > 3:
            raise ValueError(
                f"launches_in_flight={self.launches_in_flight} must be 1, 2 or 3: more "
                "only delays what the host learns"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} must be at "
                f"least max_num_seqs={self.max_num_seqs}, or running requests could "
                "not all decode in one step; raise it or lower max_num_seqs"
            )

    def shape(
        self, num_blocks: int, num_eos: int = 0, *, padding_is_free: bool = False
    ) -> EngineShape:
        """The static sizes of an engine with `num_blocks` blocks.

        Args:
          num_eos: end-of-sequence ids of the model, beside 8 of a request's own.
          padding_is_free: the model computes none, so that few launch shapes will do,
            each of which costs time to start and memory.
        """
        columns = -(-self.max_model_len // self.block_size)
        budget = self.max_num_batched_tokens
        if padding_is_free:
            rows = tuple(sorted({min(8, self.max_num_seqs), self.max_num_seqs}))
            tokens = (budget,)
        else:
            rows = _ladder(min(8, self.max_num_seqs), self.max_num_seqs, 4)
            tokens = _ladder(min(128, budget), budget, 4)
        edits = max(columns, budget)
        return EngineShape(
            num_blocks=num_blocks,
            block_size=self.block_size,
            max_slots=self.max_num_seqs,
            max_blocks_per_slot=columns,
            decode_steps=self.num_scheduler_steps,
            max_edits=edits,
            num_handles=num_blocks + edits,
            max_logprobs=self.max_logprobs,
            max_stop_ids=8 + num_eos,
            max_logit_bias=self.max_logit_bias,
            max_bad_words=self.max_bad_words,
            row_buckets=rows,
            token_buckets=tuple(sorted({*rows, *tokens})),
        )
