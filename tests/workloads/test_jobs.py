"""Streams, arrivals put on jobs, prefix hits by hand, and tokens that share as told."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jaxserve.workloads import Chain, Job, ideal_prefix_hit, token_ids, with_arrivals
from jaxserve.workloads.jobs import Streams, streams


def test_a_seed_names_four_independent_streams() -> None:
    first, again, other = streams(1), streams(1), streams(2)
    again.arrivals.random(1000)  # drawing from one leaves the others alone
    drawn = {name: getattr(first, name).random(50) for name in Streams._fields}
    for name in ("prompts", "outputs", "structure"):
        assert (getattr(again, name).random(50) == drawn[name]).all()
    for a, b in itertools.combinations(drawn.values(), 2):
        # Nothing in common; 5 / sqrt(50) would be five standard errors.
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.71
        assert not np.isin(a, b).any()
    assert not np.isin(other.arrivals.random(50), drawn["arrivals"]).any()


@pytest.mark.parametrize("seed", [-1, 1.0, True, None])
def test_a_seed_is_a_whole_number(seed) -> None:
    with pytest.raises(ValueError, match="^seed="):
        streams(seed)


def test_new_arrivals_move_deadlines_and_nothing_else() -> None:
    jobs = (
        Job(0.0, 5, 6, user="u", priority=2, tags={"k": "v"}),
        Job(1.0, 7, 8, deadline_s=4.0),
        Job(2.0, 9, 9, deadline_s=0.0),
    )
    moved = with_arrivals(jobs, [0.5, 0.5, 3.0])
    assert [job.arrival_s for job in moved] == [0.5, 0.5, 3.0]
    assert [job.deadline_s for job in moved] == [None, 3.5, 1.0]
    assert moved[0] == jobs[0]._replace(arrival_s=0.5)


@pytest.mark.parametrize("times", [[0.0], [1.0, 0.0]])
def test_arrivals_fit_the_jobs(times: list[float]) -> None:
    with pytest.raises(ValueError, match="^arrivals_s of length"):
        with_arrivals((Job(0.0, 1, 1), Job(0.0, 1, 1)), times)


def test_the_ideal_hit_of_a_trace_by_hand() -> None:
    jobs = (
        Job(0.0, 10, 1, chain=Chain((0, 1, 2), 4)),  # nothing before it
        Job(1.0, 12, 1, chain=Chain((0, 1, 3), 4)),  # 2 blocks, 8 tokens
        Job(2.0, 8, 1, chain=Chain((0, 4), 4)),  # 1 block, 4 tokens
        Job(3.0, 10, 1),  # shares nothing
        Job(4.0, 10, 1, chain=Chain((0, 1, 2), 4)),  # 3 blocks, all 10 tokens
    )
    assert ideal_prefix_hit(jobs) == (6 / 11, 22 / 50)
    assert ideal_prefix_hit(jobs[:1]) == (0.0, 0.0)
    assert ideal_prefix_hit(()) == (0.0, 0.0)


def test_a_block_of_another_size_is_another_block() -> None:
    jobs = (
        Job(0.0, 4, 1, chain=Chain((0,), 4)),
        Job(0.0, 8, 1, chain=Chain((0,), 8)),
    )
    assert ideal_prefix_hit(jobs) == (0.0, 0.0)


def tree(seed: int, n: int, block: int) -> tuple[Job, ...]:
    """Jobs whose chains are paths in a random tree, some with a tail of their own."""
    rng = np.random.Generator(np.random.PCG64(seed))
    parents: list[int | None] = [None]
    jobs = []
    for _ in range(n):
        parents.append(int(rng.integers(len(parents))))
        node, path = len(parents) - 1, []
        while node is not None:
            path.append(node)
            node = parents[node]
        tail = int(rng.integers(2 * block))
        chain = Chain(tuple(reversed(path)), block)
        jobs.append(Job(0.0, len(path) * block + tail, 9, chain=chain))
    return tuple(jobs)


def shared(a, b) -> int:
    """Length of the common prefix."""
    pairs = zip(a, b, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


@pytest.mark.parametrize(("vocab_size", "digits"), [(3, 4), (50_000, 1)])
def test_prompts_share_exactly_what_their_chains_share(
    vocab_size: int, digits: int
) -> None:
    # 40 jobs on a tree of 41 nodes: 81 to tell apart, which base 3 does in 4 digits.
    jobs = tree(seed=5, n=40, block=8)
    tokens = list(token_ids(jobs, vocab_size=vocab_size, seed=0))
    for (a, x), (b, y) in itertools.combinations(zip(jobs, tokens, strict=True), 2):
        assert a.chain and b.chain
        told = 8 * shared(a.chain.ids, b.chain.ids)
        found = shared(np.concatenate(x).tolist(), np.concatenate(y).tolist())
        assert told <= found < told + digits


def test_tokens_have_the_lengths_and_the_range() -> None:
    jobs = tree(seed=1, n=10, block=4)
    for job, (prompt, output) in zip(
        jobs, token_ids(jobs, vocab_size=11, seed=4), strict=True
    ):
        assert prompt.shape == (job.prompt_tokens,)
        assert output.shape == (job.output_tokens,)
        for ids in (prompt, output):
            assert ids.dtype == np.int32
            assert ids.min() >= 0 and ids.max() < 11


def test_jobs_that_share_nothing_differ_everywhere() -> None:
    # 100 jobs need two digits in base 10: any two in a row tell them apart.
    jobs = tuple(Job(0.0, 12, 5) for _ in range(100))
    rows = [np.concatenate(t) for t in token_ids(jobs, vocab_size=10, seed=0)]
    for start in range(16):
        assert len({tuple(row[start : start + 2].tolist()) for row in rows}) == 100
    rows = [np.concatenate(t) for t in token_ids(jobs, vocab_size=100, seed=0)]
    for start in range(17):
        assert len({int(row[start]) for row in rows}) == 100


def test_equal_prompts_have_answers_of_their_own() -> None:
    jobs = tuple(Job(0.0, 6, 3, chain=Chain((0, 1), 4)) for _ in range(2))
    a, b = token_ids(jobs, vocab_size=64, seed=0)
    assert (a.prompt == b.prompt).all()
    assert (a.output != b.output).all()


def test_the_seed_alone_decides_the_tokens() -> None:
    jobs = tree(seed=2, n=5, block=4)

    def made(seed: int) -> list[list[int]]:
        drawn = token_ids(jobs, vocab_size=1000, seed=seed)
        return [np.concatenate(t).tolist() for t in drawn]

    assert made(3) == made(3)
    assert made(3) != made(4)


def test_a_prompt_is_not_all_one_token() -> None:
    (only,) = token_ids((Job(0.0, 200, 1),), vocab_size=1000, seed=0)
    assert len(set(only.prompt.tolist())) > 150


def test_a_vocabulary_too_small_for_the_blocks_is_refused() -> None:
    jobs = tuple(Job(0.0, 2, 1, chain=Chain((i,), 2)) for i in range(20))
    # 40 things in base 3 take four digits, and a block holds two.
    with pytest.raises(ValueError, match="^block_tokens=2 must be >= 4, .*vocab_size"):
        token_ids(jobs, vocab_size=3, seed=0)
    with pytest.raises(ValueError, match="^vocab_size=1 must"):
        token_ids(jobs, vocab_size=1, seed=0)
