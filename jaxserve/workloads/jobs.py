"""What a workload is: requests with their truths, and the tokens that stand for them.

Owns the Job, the random streams of a seed, and the expansion of lengths and prefix
chains into token ids. Never sees the engine: callers submit the prompts, and hand the
outputs to a simulated executor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxserve.workloads import checks


class Chain(NamedTuple):
    """What a prompt shares with others: an id for each of its leading blocks.

    An id names a block together with all before it, so two prompts share their first k
    blocks exactly when their first k ids are equal. The last block may be cut short by
    the prompt's end, and tokens behind the last id are the request's own.
    """

    ids: tuple[int, ...]
    block_tokens: int


class Job(NamedTuple):
    """One request as the world knows it, its output's length included."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int  # the truth: what it would generate if nothing stops it
    user: str | None = None
    tags: Mapping[str, str] | None = None  # a trace's predictions are among them
    priority: int = 0  # lower first
    deadline_s: float | None = None  # absolute, for the last token
    chain: Chain | None = None  # None: the whole prompt is its own


Workload = tuple[Job, ...]
"""Jobs in order of arrival."""


class Streams(NamedTuple):
    """Independent random streams: what one is used for leaves the others alone."""

    arrivals: np.random.Generator
    prompts: np.random.Generator
    outputs: np.random.Generator
    structure: np.random.Generator  # users, sessions


def streams(seed: int) -> Streams:
    """The streams of a seed; the same on every platform."""
    checks.count("seed", seed, 0, "seeds of a sweep are 0, 1, 2, ...")
    children = np.random.SeedSequence(seed).spawn(len(Streams._fields))
    return Streams(*(np.random.Generator(np.random.PCG64(c)) for c in children))


def with_arrivals(
    workload: Workload, arrivals_s: Sequence[float] | np.ndarray
) -> Workload:
    """The same requests at other times, in the same order; deadlines move along."""
    times = [float(t) for t in arrivals_s]
    if len(times) != len(workload) or times != sorted(times):
        raise ValueError(
            f"arrivals_s of length {len(times)} must be one time for each of the "
            f"{len(workload)} jobs, ascending; draw them with jaxserve.workloads."
            "arrivals"
        )

    def moved(job: Job, time: float) -> Job:
        if job.deadline_s is None:
            return job._replace(arrival_s=time)
        left_s = job.deadline_s - job.arrival_s
        return job._replace(arrival_s=time, deadline_s=time + left_s)

    return tuple(map(moved, workload, times))


class PrefixHit(NamedTuple):
    """Shares that a cache without limits would find, in order of arrival."""

    blocks: float  # of the chains' blocks, a cut one counted as one
    tokens: float  # of all prompt tokens


def ideal_prefix_hit(workload: Workload) -> PrefixHit:
    """How much of the prompts came before in an earlier prompt."""
    seen: set[tuple[int, int]] = set()
    blocks = hit_blocks = hit_tokens = 0
    for job in workload:
        ids, size = job.chain or Chain((), 1)
        found = 0
        while found < len(ids) and (size, ids[found]) in seen:
            found += 1
        seen.update((size, i) for i in ids)
        blocks += len(ids)
        hit_blocks += found
        hit_tokens += min(found * size, job.prompt_tokens)
    tokens = sum(job.prompt_tokens for job in workload)
    return PrefixHit(hit_blocks / max(blocks, 1), hit_tokens / max(tokens, 1))


class Tokens(NamedTuple):
    """The token ids of one job."""

    prompt: np.ndarray  # i32[prompt_tokens]
    output: np.ndarray  # i32[output_tokens]


def token_ids(workload: Workload, *, vocab_size: int, seed: int) -> Iterator[Tokens]:
    """Each job's tokens, made one job at a time since long traces fill gigabytes.

    Prompts are equal as far as their chains are. Everything else differs at its first d
    tokens and at any d in a row, d being the digits it takes to count jobs and blocks
    in base `vocab_size`: 1 for all but tiny vocabularies.

    Raises:
      ValueError: d exceeds a chain's block, whose content could not tell it apart.
    """
    checks.count("vocab_size", vocab_size, 2, "one token cannot tell prompts apart")
    checks.count("seed", seed, 0, "seeds of a sweep are 0, 1, 2, ...")
    number: dict[tuple[int, int], int] = {}
    for job in workload:
        ids, size = job.chain or Chain((), 1)
        for i in ids:
            number.setdefault((size, i), len(workload) + len(number))
    digits = 1
    while vocab_size**digits < len(workload) + len(number):
        digits += 1
    for size in {size for size, _ in number}:
        if size < digits:
            raise ValueError(
                f"block_tokens={size} must be >= {digits}, the digits of "
                f"{len(workload) + len(number)} in base vocab_size={vocab_size}; "
                "raise vocab_size"
            )
    sizes = [job.prompt_tokens + job.output_tokens for job in workload]
    longest = max(sizes, default=0)
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
    noise = rng.integers(vocab_size, size=longest)
    powers = np.resize([vocab_size**k for k in range(digits)], longest)

    def expand(index: int, job: Job) -> Tokens:
        owner = np.full(sizes[index], index)
        if job.chain is not None:
            ids, size = job.chain
            shared = np.repeat([number[size, i] for i in ids], size)
            shared = shared[: job.prompt_tokens]
            owner[: shared.size] = shared
        digit = owner // powers[: owner.size] % vocab_size
        tokens = ((noise[: owner.size] + digit) % vocab_size).astype(np.int32)
        return Tokens(tokens[: job.prompt_tokens], tokens[job.prompt_tokens :])

    return (expand(index, job) for index, job in enumerate(workload))
