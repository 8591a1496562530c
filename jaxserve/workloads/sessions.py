"""Prompts that share prefixes: documents that are asked about more than once.

Owns the structure of a synthetic prefix workload, for where no trace is at hand.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxserve.workloads import checks, lengths
from jaxserve.workloads.jobs import Chain, Streams


class Prompt(NamedTuple):
    """A prompt's length and what it shares."""

    tokens: int
    chain: Chain


def documents(
    n: int,
    prompt_tokens: lengths.Lengths,
    streams: Streams,
    *,
    mean_questions: float,
    mean_gap: float,
    block_tokens: int = 512,
) -> tuple[Prompt, ...]:
    """n prompts, each a document and a question, documents returning at random.

    Prompts about one document are equally long and share all blocks but the last, which
    holds the question. So prompt lengths have the given distribution, and an infinite
    cache would find about 1 - 1 / mean_questions of the blocks of long ones.

    Args:
      mean_questions: per document, geometric.
      mean_gap: between two questions on a document, exponential, counted in questions
        on any document; it decides how large a cache must be.
    """
    checks.count("n", n, 1, "ask for at least one request")
    checks.above("mean_questions", mean_questions, 1, "one alone shares nothing")
    checks.above("mean_gap", mean_gap, 0, "give it in requests")
    rng = streams.structure
    # Documents enough: in order of time, the first n questions are on the first n.
    questions = lengths.geometric(mean_questions, cap=n + 1)(rng.random(n))
    document = np.repeat(np.arange(n), questions)
    gaps = rng.standard_exponential(document.size) * mean_gap
    first = np.cumsum(questions) - questions
    elapsed = np.cumsum(gaps)
    asked = document * mean_questions + elapsed - elapsed[first][document]
    tokens = prompt_tokens(streams.prompts.random(n)).tolist()

    prompts: list[Prompt] = []
    shared: dict[int, tuple[int, ...]] = {}
    fresh = 0
    for d in document[np.argsort(asked, kind="stable")[:n]].tolist():
        if d not in shared:
            size = (tokens[d] - 1) // block_tokens
            shared[d] = tuple(range(fresh, fresh + size))
            fresh += size
        chain = Chain((*shared[d], fresh), block_tokens)
        fresh += 1
        prompts.append(Prompt(tokens[d], chain))
    return tuple(prompts)
