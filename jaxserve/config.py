"""What a user may set for one engine: its shape and its switches.

Owns the validation of every field (each error names field, value, rule and remedy) and
the list of compiled launch shapes. Never sees a model, a device array or a request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from jaxserve.fields import flag, integer, one_of, real

LONGEST_BAD_WORD = 16
"""Tokens of a bad word, at most: the device looks back as far."""


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
                object.__setattr__(self, field, integer(field, value, low, hint))
        flag("enable_prefix_caching", self.enable_prefix_caching)
        modes = ("recompute", "swap", "disk", "auto", "article")
        one_of("preemption_mode", self.preemption_mode, modes)
        one_of("tier_write", self.tier_write, ("never", "on_eviction", "through"))
        one_of("tier_eviction", self.tier_eviction, ("lru", "lfu", "cost"))
        timeout_s = real("transfer_timeout_s", self.transfer_timeout_s, 0.0, 1e6)
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
        one_of("batching", self.batching, ("continuous", "static"))
        one_of("prefill", self.prefill, ("chunked", "prefill_first", "decode_first"))
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
