"""Documents that are asked about more than once."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from jaxserve.workloads import Job, ideal_prefix_hit
from jaxserve.workloads.jobs import streams
from jaxserve.workloads.lengths import constant, uniform
from jaxserve.workloads.sessions import documents


def test_a_document_is_shared_up_to_the_block_of_the_question() -> None:
    prompts = documents(
        500, uniform(1, 99), streams(0), mean_questions=3, mean_gap=20, block_tokens=10
    )
    assert len(prompts) == 500
    uses = Counter(i for prompt in prompts for i in prompt.chain.ids)
    length: dict[int, int] = {}
    for tokens, chain in prompts:
        assert chain.block_tokens == 10
        assert len(chain.ids) == math.ceil(tokens / 10)
        *shared, last = chain.ids
        assert uses[last] == 1
        # All questions on a document have its length and all its blocks.
        assert len({uses[i] for i in shared}) <= 1
        for i in shared:
            assert length.setdefault(i, tokens) == tokens


def test_the_hit_is_that_of_the_questions_after_the_first() -> None:
    n, mean = 20_000, 2.5
    prompts = documents(
        n, constant(50), streams(0), mean_questions=mean, mean_gap=5, block_tokens=10
    )
    jobs = tuple(Job(0.0, p.tokens, 1, chain=p.chain) for p in prompts)
    first = len({p.chain.ids[0] for p in prompts})
    # Four of five blocks are the document's.
    expected = (n - first) / n * 4 / 5
    assert ideal_prefix_hit(jobs) == pytest.approx((expected, expected))
    # n / mean documents; a geometric count has variance mean (mean - 1).
    error = math.sqrt(n / mean * mean * (mean - 1)) / mean
    assert first == pytest.approx(n / mean, abs=5 * error + 5)


@pytest.mark.parametrize("field", ["mean_questions", "mean_gap"])
def test_what_is_refused_is_named(field: str) -> None:
    given = {"mean_questions": 2.0, "mean_gap": 5.0} | {field: 0.0}
    with pytest.raises(ValueError, match=f"^{field}=0.0 must be .*; "):
        documents(5, constant(9), streams(0), **given)


def test_gaps_are_counted_in_requests() -> None:
    n, gap = 20_000, 100
    prompts = documents(
        n, constant(20), streams(3), mean_questions=3, mean_gap=gap, block_tokens=10
    )
    seen: dict[int, int] = {}
    gaps = []
    for at, prompt in enumerate(prompts):
        name = prompt.chain.ids[0]
        if name in seen:
            gaps.append(at - seen[name])
        seen[name] = at
    # An exponential's deviation is its mean. Questions also come at random, hence a
    # little more; cut at the end, hence a little less.
    assert np.mean(gaps) == pytest.approx(gap, rel=0.05)
    assert np.std(gaps) == pytest.approx(gap, rel=0.1)
