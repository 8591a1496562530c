"""Random small workloads, and the engines that serve them while a policy is checked.

Owns what a case is. Never sees a policy.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from jaxserve.config import EngineConfig
from jaxserve.executors.sim_executor import Truth

_BASE = EngineConfig(
    max_model_len=40,
    max_num_seqs=3,
    max_num_batched_tokens=12,
    block_size=4,
    num_blocks=80,
    max_logprobs=0,
)
TIGHT_BLOCKS = 12
"""Memory for one request of full length and little else; 80 blocks are plenty."""


def _setting(launches: int, steps: int, blocks: int, **fields: Any) -> EngineConfig:
    return dataclasses.replace(
        _BASE,
        launches_in_flight=launches,
        num_scheduler_steps=steps,
        num_blocks=blocks,
        **fields,
    )


SETTINGS: tuple[EngineConfig, ...] = (
    _setting(1, 4, TIGHT_BLOCKS, enable_prefix_caching=False),
    _setting(2, 4, 80, prefill="decode_first", enable_prefix_caching=False),
    _setting(3, 1, 80, prefill="prefill_first"),
    _setting(1, 1, TIGHT_BLOCKS),
    _setting(2, 1, TIGHT_BLOCKS, prefill="prefill_first", enable_prefix_caching=False),
    _setting(3, 4, TIGHT_BLOCKS, prefill="decode_first"),
    _setting(1, 1, 80, batching="static", enable_prefix_caching=False),
    _setting(1, 1, 80, max_chunk_tokens=3),
)
"""Every value of each switch is met under tight and under plenty of memory."""


class Asked(NamedTuple):
    """One request of a case, and the output that it will have."""

    prompt: list[int]
    output: list[int]
    max_tokens: int  # more than the output if that ends in a stop id
    arrival_s: float
    priority: int
    user: str | None
    deadline_s: float | None
    tags: dict[str, str]
    text: str | None
    salt: str | None
    abort_after: int | None  # engine steps


class Case(NamedTuple):
    """Requests and the engine that is to serve them."""

    seed: int
    config: EngineConfig
    requests: Sequence[Asked]

    @property
    def lengths(self) -> Mapping[int, int]:
        """Output tokens by submission index: what no policy may know."""
        return {i: len(asked.output) for i, asked in enumerate(self.requests)}

    @property
    def truth(self) -> Mapping[int, Truth]:
        """What the simulated executor returns, by submission index."""
        return {
            i: Truth(asked.output, stops=len(asked.output) < asked.max_tokens)
            for i, asked in enumerate(self.requests)
        }

    @property
    def tokens(self) -> int:
        """All prompt and output tokens."""
        return sum(len(a.prompt) + len(a.output) for a in self.requests)

    def without_aborts(self) -> Case:
        """The same requests, all served to their end."""
        return self._replace(
            requests=[asked._replace(abort_after=None) for asked in self.requests]
        )

    def fail(self, rule: str, what: str, cause: Exception | None = None) -> NoReturn:
        """Raise what a broken rule raises."""
        changed = {
            field.name: getattr(self.config, field.name)
            for field in dataclasses.fields(self.config)
            if getattr(self.config, field.name) != field.default
        }
        message = f"{rule}: {what} (seed={self.seed}, {changed})"
        raise AssertionError(message) from cause


def random_requests(
    rng: random.Random, count: int, *, longest_output: int = 14, aborts: bool = True
) -> list[Asked]:
    """Requests with shared prefixes, bursts, users, priorities, deadlines, tags."""
    shared = [[rng.randrange(97) for _ in range(16)] for _ in range(2)]
    now_s, requests = 0.0, []
    for _ in range(count):
        now_s += rng.choice([0.0, 0.0, 0.01, 0.05, 0.1])
        prefix = rng.choice(shared)[: rng.choice([0, 0, 4, 8, 16])]
        own = [rng.randrange(97) for _ in range(rng.randint(1, 20 - len(prefix)))]
        max_tokens = rng.randint(1, longest_output)
        length = rng.choice([max_tokens, rng.randint(1, max_tokens)])
        late_s = rng.choice([None, 0.05, 0.3, 1.0])
        aborted = aborts and rng.random() < 0.15
        requests.append(
            Asked(
                prompt=prefix + own,
                output=[rng.randrange(97) for _ in range(length)],
                max_tokens=max_tokens,
                arrival_s=round(now_s, 3),
                priority=rng.randrange(3),
                user=rng.choice([None, "ann", "ben", "eve"]),
                deadline_s=None if late_s is None else round(now_s + late_s, 3),
                tags=rng.choice([{}, {"kind": "chat"}, {"kind": "code"}]),
                text=rng.choice([None, "answer briefly", "explain in detail"]),
                salt=rng.choice([None, None, None, "salt"]),
                abort_after=rng.randint(0, 60) if aborted else None,
            )
        )
    return requests


def two_futures(
    rng: random.Random, count: int, shared_tokens: int
) -> tuple[list[Asked], list[Asked]]:
    """The same requests with two truths, equal up to shared_tokens output tokens of
    each and of other tokens and lengths from there on."""
    one, two, longest = [], [], 14
    for asked in random_requests(rng, count, aborts=False):
        asked = asked._replace(max_tokens=longest)
        known = [rng.randrange(97) for _ in range(shared_tokens)]
        for requests, start in ((one, 0), (two, 97)):
            more = rng.randint(1, longest - shared_tokens)
            rest = [start + rng.randrange(97) for _ in range(more)]
            requests.append(asked._replace(output=known + rest))
    return one, two
