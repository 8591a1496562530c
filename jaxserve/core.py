"""The types that cross between the host, the executors and the user; numpy only.

Owns the layout of a launch's plan and the schema of events. Never sees JAX, a physical
block id or a policy.

Axes: S slots, M columns per slot, P blocks, B tokens per block, R rows in a launch,
T tokens of the mixed step, N decode steps, H handles, K edits, W top log-probabilities,
E stop ids. A padded entry holds the size of its axis, which scatters drop (-1 would
write the last element).
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from jaxserve.config import EngineShape
from jaxserve.processors import Processors
from jaxserve.sampling_params import SamplingParams

I32 = np.int32

ADMIT_FIELDS = (
    "slot",
    "seed_high",
    "seed_low",
    "sample_index",
    "temperature",  # f32 bits
    "top_k",
    "top_p",  # f32 bits
    "min_p",  # f32 bits
    "stop_from",  # sequence length from which stop ids may be drawn
    "wants_logprobs",
    "processed",  # the slot's tables hold what its logits go through first
)
"""Columns of `StepPlan.admit`; E stop ids follow, padded with the vocabulary's end."""


Ints = Any
"""An i32 array: numpy on the host, JAX's inside a launch."""


class StepPlan(NamedTuple):
    """What one launch does, in logical coordinates; numpy arrays of fixed shape.

    Applied in this order: seal, release, retire, adopt, admit, grow, mixed step (decode
    rows and prompt chunks in one forward), publish, further decode steps.

    Rows are listed pure decode rows first, then those with a chunk to be scored, then
    the others. The R axis of `StepOutput` is `decode`'s.
    """

    seal: Ints  # i32[K, 3] slot, column, handle: name a full, observed column
    release: Ints  # i32[R] slots whose columns are given back
    retire: Ints  # i32[K] handles forgotten
    adopt: Ints  # i32[K, 3] slot, column, handle: table[slot, column] := handle's
    publish: Ints  # i32[K, 3] slot, column, handle: named after the mixed step
    admit: Ints  # i32[R, A] ADMIT_FIELDS + stop ids, of the slots taken
    chunk: Ints  # i32[T, 3] slot, position, token; after the decode rows' tokens
    decode: Ints  # i32[R, 2] slot, steps allowed (sampled tokens, row 0 included)
    chunk_end: Ints  # i32[R] length after the row's chunk; 0 = a decode row
    # i32[R] the token after the row's chunk, whose tokens are to be scored (any where
    # the host knows of none); -1 = a row without scores
    follow: Ints

    @property
    def rows(self) -> int:
        """R, the row bucket of this launch."""
        return self.decode.shape[0]

    @property
    def tokens(self) -> int:
        """T, the token bucket of the mixed step; 0 = the launch only edits blocks."""
        return self.chunk.shape[0]


class Scores(NamedTuple):
    """Log-probabilities of prompt tokens, in the order of `StepPlan.chunk`.

    Entry i is of the token that follows chunk token i, for the rows that ask.
    """

    logprobs: np.ndarray  # f32[T]
    ranks: np.ndarray  # i32[T] 1 = the likeliest
    top_ids: np.ndarray  # i32[T, W] likeliest tokens, descending
    top_logprobs: np.ndarray  # f32[T, W]


class StepOutput(NamedTuple):
    """What one launch produced; axes N (steps) and R (the plan's rows)."""

    tokens: np.ndarray  # i32[N, R]
    ran: np.ndarray  # bool[N, R] whether the row sampled a token in that step
    done: np.ndarray  # bool[R] the row's last token is one of its stop ids
    num_free: int  # unowned blocks after the launch
    logprobs: np.ndarray | None = None  # f32[N, R] of the tokens, unscaled distribution
    ranks: np.ndarray | None = None  # i32[N, R] 1 = the likeliest
    top_ids: np.ndarray | None = None  # i32[N, R, W] likeliest tokens, descending
    top_logprobs: np.ndarray | None = None  # f32[N, R, W]
    scores: Scores | None = None  # None where no row of the plan asked


def plan_sizes(
    shape: EngineShape, rows: int, tokens: int
) -> dict[str, tuple[int, ...]]:
    """Shape of each field of the plan for launch shape (R, T)."""
    k, width = shape.max_edits, len(ADMIT_FIELDS) + shape.max_stop_ids
    return {
        "seal": (k, 3),
        "release": (rows,),
        "retire": (k,),
        "adopt": (k, 3),
        "publish": (k, 3),
        "admit": (rows, width),
        "chunk": (tokens, 3),
        "decode": (rows, 2),
        "chunk_end": (rows,),
        "follow": (rows,),
    }


def empty_plan(shape: EngineShape, rows: int, tokens: int) -> StepPlan:
    """A plan of padding alone, of launch shape (R, T); freshly allocated."""
    return StepPlan(*(field.copy() for field in _padding(shape, rows, tokens)))


@lru_cache(maxsize=256)
def _padding(shape: EngineShape, rows: int, tokens: int) -> StepPlan:
    s, m, h = shape.max_slots, shape.max_blocks_per_slot, shape.num_handles
    edit, fill = (s, m, h), {"chunk": (s, 0, 0), "decode": (s, 0), "chunk_end": 0}
    fill |= {"seal": edit, "adopt": edit, "publish": edit, "retire": h}
    fill |= {"release": s, "admit": s, "follow": -1}
    return StepPlan(
        **{
            name: np.broadcast_to(np.array(fill[name], I32), dims).copy()
            for name, dims in plan_sizes(shape, rows, tokens).items()
        }
    )


def pack(plan: StepPlan) -> np.ndarray:
    """The plan as one i32 vector, so that a launch transfers a single buffer."""
    return np.concatenate([field.reshape(-1) for field in plan])


def unpack(buffer: Any, shape: EngineShape, rows: int, tokens: int) -> StepPlan:
    """Slice a packed plan; works on numpy and, with static sizes, inside a jit."""
    fields, start = [], 0
    for dims in plan_sizes(shape, rows, tokens).values():
        size = int(np.prod(dims))
        fields.append(buffer[start : start + size].reshape(dims))
        start += size
    return StepPlan(*fields)


class Event(NamedTuple):
    """One fact about a run. `EVENT_FIELDS` lists the kinds and the keys of `data`."""

    kind: str
    time_s: float
    request_id: str | None
    data: Mapping[str, Any]

    def json(self) -> dict[str, Any]:
        """A flat dict for a JSON line."""
        return {
            "kind": self.kind,
            "time_s": self.time_s,
            "request_id": self.request_id,
            **self.data,
        }


EVENT_FIELDS: dict[str, tuple[str, ...]] = {
    # Events of a request also carry "index", its submission index: ids may come again.
    # A plan sees the request for the first time; arrival_s: when it arrived, by the
    # caller's word.
    "arrived": ("arrival_s", "prompt_tokens", "priority", "user", "deadline_s"),
    # It got a slot. cached_tokens: KV rows found in the prefix cache by this admission;
    # restored_tokens: those copied back from the host; context_tokens: what it must
    # hold before sampling; first: not a resumption.
    "admitted": (
        "slot",
        "cached_tokens",
        "restored_tokens",
        "context_tokens",
        "first",
    ),
    # A launch that was read computed prompt_tokens of its prompt and sampled
    # output_tokens (kept) of its output, on `slot`. Under static batching the output
    # is told all at once, when its batch ends.
    "progressed": ("slot", "prompt_tokens", "output_tokens"),
    # It lost its slot; mode "recompute" | "swap" | "disk". lost_tokens: KV rows it gave
    # up, cached or not; but with "recompute" they are kept below the device.
    "preempted": ("slot", "mode", "lost_tokens"),
    # A preempted request has what it lost again: by "recompute", "swap" or "disk", in
    # so many seconds. predicted_s: what that was expected to take when it was chosen;
    # other_s: the best other way; others: requests whose launches computing it again
    # would make longer.
    "resumed": ("mode", "predicted_s", "other_s", "others", "actual_s"),
    # It ended: reason "stop" | "length" | "abort". The totals are the user's.
    # finish_delay_s: how long ago its last token was sampled, taking the steps of a
    # launch as equally long: the wait for the rest of the launch, or of a static batch.
    "finished": (
        "reason",
        "prompt_tokens",
        "cached_tokens",
        "output_tokens",
        "finish_delay_s",
    ),
    # A launch was read. token_bucket and row_bucket are the compiled T and R;
    # prefill_tokens, decode_rows: what the mixed step held; decode_tokens: tokens
    # sampled; padded_tokens: positions computed for nobody; slots: [slot, prompt
    # tokens, output tokens] of each row; num_free: blocks nobody owns; live_handles:
    # blocks with a name, idle_handles: those of them that no slot uses; compiles:
    # programs compiled since the last such event; host_s: scheduling time (plan and
    # observe); submitted_s: when it was handed to the executor; steps: run.
    "launch": (
        "launch",
        "row_bucket",
        "token_bucket",
        "prefill_tokens",
        "decode_rows",
        "decode_tokens",
        "padded_tokens",
        "steps",
        "slots",
        "num_free",
        "live_handles",
        "idle_handles",
        "waiting",
        "running",
        "compiles",
        "host_s",
        "submitted_s",
    ),
}


class TokenLogprobs(NamedTuple):
    """Natural-log probabilities at one output position, unscaled distribution."""

    chosen: float
    rank: int  # of the chosen token; 1 = the likeliest
    top_ids: list[int]  # likeliest first
    top: list[float]


@dataclasses.dataclass
class Computed:
    """What a request, or one that it was forked from, has computed itself.

    Attributes:
      rows: most KV rows after a launch that was planned.
      prompt_logprobs: of the prompt from its second token on, if asked for, as far as
        launches were read.
    """

    rows: int = 0
    prompt_logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Family:
    """Requests that share a beginning: forks of one, and forks of those.

    Attributes:
      index: submission index of the first; unseeded ones draw from its stream.
      samples: how many sample indices are taken; no two of a family are equal.
      alive: how many have not ended.
    """

    index: int
    samples: int = 1
    alive: int = 1


class Request:
    """One request and what is known of its output; the host's only mutable record of
    it.

    Attributes:
      request_id: the caller's name for it.
      index: submission index, unique for the life of the engine.
      prompt: its prompt token ids.
      params: its sampling parameters.
      max_output_tokens: max_tokens after the limits of the model and of memory.
      stop_ids: token ids that end it, the model's end-of-sequence ids included.
      arrival_s: when it arrived, on the engine's clock.
      priority, user, deadline_s, tags: what policies may rank by. Lower priority first.
      cache_salt: requests of different salt share no cached block.
      text: the prompt's, where the caller gave one; policies may read it.
      sample_index: which of the samples of its random stream it draws.
      family: those that it shares tokens with; None if it was never forked.
      forked_from: submission index of the one it was forked from.
      shared: leading tokens that are that one's too, as far as they had KV rows.
      processors: what its logits go through before a token is drawn; None = nothing.
      computed: what of it was computed without others; forks share it.
      output: observed output tokens.
      num_cached_tokens: prompt tokens found in the cache at first admission.
      preemptions: how often it lost its slot.
      finish_reason: "stop", "length" or "abort" once it ended; None while it lives.
    """

    __slots__ = (
        "arrival_s",
        "cache_salt",
        "computed",
        "deadline_s",
        "family",
        "finish_reason",
        "forked_from",
        "index",
        "logprobs",
        "max_output_tokens",
        "num_cached_tokens",
        "output",
        "params",
        "preemptions",
        "priority",
        "processors",
        "prompt",
        "request_id",
        "sample_index",
        "shared",
        "skipped",
        "stop_ids",
        "tags",
        "text",
        "user",
    )

    def __init__(
        self,
        request_id: str,
        index: int,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        max_output_tokens: int,
        stop_ids: tuple[int, ...] = (),
        arrival_s: float = 0.0,
        priority: int = 0,
        user: str | None = None,
        deadline_s: float | None = None,
        tags: Mapping[str, str] | None = None,
        cache_salt: str | None = None,
        text: str | None = None,
        processors: Processors | None = None,
    ):
        self.request_id = request_id
        self.index = index
        self.prompt = list(prompt)
        self.params = params
        self.max_output_tokens = max_output_tokens
        self.stop_ids = stop_ids
        self.arrival_s = arrival_s
        self.priority = priority
        self.user = user
        self.deadline_s = deadline_s
        self.tags = dict(tags or {})
        self.cache_salt = cache_salt
        self.text = text
        self.sample_index = 0
        self.family: Family | None = None
        self.forked_from: int | None = None
        self.shared = 0
        self.processors = processors
        self.output: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.computed = Computed()
        self.num_cached_tokens: int | None = None
        self.preemptions = 0
        self.finish_reason: str | None = None
        self.skipped = 0  # admissions that passed it while it waited for memory

    @property
    def stream(self) -> int:
        """Submission index that its random stream is of: forks draw other samples of
        the same."""
        return self.family.index if self.family else self.index

    @property
    def num_tokens(self) -> int:
        """Observed tokens, prompt and output."""
        return len(self.prompt) + len(self.output)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids [start, stop) of prompt and output together."""
        n = len(self.prompt)
        if stop <= n:
            return self.prompt[start:stop]
        if start >= n:
            return self.output[start - n : stop - n]
        return self.prompt[start:] + self.output[: stop - n]


def forked(
    request: Request,
    request_id: str,
    index: int,
    params: SamplingParams,
    max_output_tokens: int,
    stop_ids: tuple[int, ...],
    processors: Processors | None,
) -> Request:
    """A request that goes on from where another is, all of whose launches are read."""
    if request.family is None:
        request.family = Family(request.index)
    fork = Request(
        request_id,
        index,
        request.prompt,
        params,
        max_output_tokens=max_output_tokens,
        stop_ids=stop_ids,
        arrival_s=request.arrival_s,
        priority=request.priority,
        user=request.user,
        deadline_s=request.deadline_s,
        tags=request.tags,
        cache_salt=request.cache_salt,
        text=request.text,
        processors=processors,
    )
    fork.computed = request.computed
    family = fork.family = request.family
    fork.sample_index = family.samples
    family.samples += 1
    family.alive += 1
    fork.forked_from = request.index
    # The last token of both has no KV row: of an output it is fed next, of a prompt it
    # is computed by each.
    fork.shared = request.num_tokens - 1
    fork.output = list(request.output)
    fork.logprobs = list(request.logprobs)
    return fork


def random_seed(engine_seed: int, index: int, seed: int | None) -> int:
    """The 64-bit seed of a request's stream: its own, or one from its submission index.

    A seeded request draws the same tokens on any engine; an unseeded one draws the same
    tokens in any run that submits the same requests in the same order.
    """
    if seed is not None:
        return seed & (2**64 - 1)
    text = f"{engine_seed}/{index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
