"""Requests that go on in several ways: shared blocks, a copied one, nothing else."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from jaxserve.models.hash_model import next_token
from jaxserve.scheduling.policies import fcfs
from tests.engine.harness import (
    EVERY_KIND,
    EXECUTORS,
    JAX,
    Served,
    by_priority,
    config,
    jax_executor,
    preempt,
)
from tests.serving import direct, greedy, sampled

PROMPT = [5, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("b", "launches", "steps"), EVERY_KIND)
def test_a_fork_goes_on_as_its_own_request(
    b: int, launches: int, steps: int, caching: bool
) -> None:
    shape = config(
        b,
        launches,
        steps,
        num_blocks=200,
        max_num_seqs=4,
        enable_prefix_caching=caching,
    )
    served = Served(shape)
    served.add("a", PROMPT, 30, temperature=1.0, seed=3)
    served.until(lambda: len(served.tokens("a")) >= 4)
    served.engine.fork("a", "b")
    had = _output(served, "a")
    served.until(lambda: len(served.tokens("b")) >= len(had) + 3)
    served.engine.fork("b", "c")
    of_b = _output(served, "b")
    served.engine.fork("a", "d")
    served.finish()
    assert served.tokens("a") == sampled(PROMPT, [], 30, 3, 0)
    assert served.tokens("b") == sampled(PROMPT, had, 30, 3, 1)
    assert served.tokens("c") == sampled(PROMPT, of_b, 30, 3, 2)
    assert served.tokens("d")[: len(had)] == had
    stats = served.stats()
    assert stats["prefill_tokens"] == len(PROMPT)  # nothing is computed twice
    assert stats["prefix_queries_tokens"] == len(PROMPT)
    if not caching:
        assert stats["cached_blocks"] == 0
    assert stats["free_blocks"] + stats["cached_blocks"] == 200


def _output(served: Served, name: str) -> list[int]:
    """What a request has, all launches being read."""
    return list(served.engine._clients.live[name].lives[0].request.output)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("caching", [True, False])
def test_blocks_are_shared_and_one_is_copied(executor: str, caching: bool) -> None:
    """B = 4; 7 prompt tokens and 4 outputs have 10 rows: 2 full blocks, and 2 rows."""
    shape = config(
        4, 1, 1, num_blocks=64, max_num_seqs=4, enable_prefix_caching=caching
    )
    if executor == "device":
        shape = dataclasses.replace(JAX, enable_prefix_caching=caching)
    served = Served(shape, executor=EXECUTORS[executor])
    served.add("a", PROMPT, 12)
    served.until(lambda: len(served.tokens("a")) == 4)
    before = served.stats()["free_blocks"]
    for name in "bcd":
        served.engine.fork("a", name)
    served.step()  # admits them; each has a copy of the third block
    assert before - served.stats()["free_blocks"] == 3
    served.finish()
    for name in "abcd":
        assert served.tokens(name) == direct(PROMPT, 12)
    assert served.stats()["forked_tokens"] == 3 * 10


@pytest.mark.parametrize("state", ["waiting", "in its prompt", "one token"])
@pytest.mark.parametrize("caching", [True, False])
def test_a_fork_of_a_request_that_has_hardly_begun(state: str, caching: bool) -> None:
    shape = config(
        4,
        1,
        1,
        num_blocks=64,
        max_num_seqs=3,
        max_num_batched_tokens=4,
        enable_prefix_caching=caching,
    )
    served = Served(shape)
    served.add("a", PROMPT * 2, 6, temperature=1.0, seed=8)
    if state == "in its prompt":
        served.step()
    elif state == "one token":
        served.until(lambda: len(served.tokens("a")) == 1)
    had = list(served.tokens("a"))
    served.engine.fork("a", "b")
    served.finish()
    assert served.tokens("a") == sampled(PROMPT * 2, [], 6, 8, 0)
    assert served.tokens("b") == sampled(PROMPT * 2, had, 6, 8, 1)
    # The last token of the prompt is computed by each, unless it was before.
    extra = 0 if had else 1
    assert served.stats()["prefill_tokens"] == 14 + extra


@pytest.mark.parametrize("mode", ["recompute", "swap", "disk"])
@pytest.mark.parametrize("caching", [True, False])
def test_forks_are_preempted_and_end_on_their_own(mode: str, caching: bool) -> None:
    shape = config(
        4,
        1,
        1,
        num_blocks=64,
        max_num_seqs=3,
        enable_prefix_caching=caching,
        preemption_mode=mode,
        num_swap_blocks=40,
        num_disk_blocks=40,
    )
    served = Served(shape, policy=by_priority())
    served.add("a", PROMPT, 12)
    served.until(lambda: len(served.tokens("a")) == 3)
    served.engine.fork("a", "b")
    served.engine.fork("a", "c")
    served.until(lambda: len(served.tokens("c")) >= 5)
    preempt(served)
    served.engine.abort_request("a")
    preempt(served)
    served.finish()
    for name in "bc":
        assert served.tokens(name) == direct(PROMPT, 12)
    assert served.stats()["preemptions"] >= 1
    assert served.stats()["free_blocks"] + served.stats()["cached_blocks"] == 64


def test_a_parent_that_is_gone_is_computed_again() -> None:
    served = Served(config(4, 1, 1, num_blocks=64, max_num_seqs=1))
    served.add("a", PROMPT, 5)
    served.until(lambda: len(served.tokens("a")) == 2)
    served.engine.fork("a", "b")
    served.engine.abort_request("a")
    served.finish()
    assert served.tokens("b") == direct(PROMPT, 5)


def test_forks_of_other_parameters() -> None:
    served = Served(config(4, 1, 1, num_blocks=64, max_num_seqs=3), eos=(80,))
    served.add("a", PROMPT, 8)
    served.until(lambda: len(served.tokens("a")) == 2)
    longer = greedy(8)
    served.engine.fork("a", "b", dataclasses.replace(longer, max_tokens=12))
    served.finish()
    assert served.tokens("b")[:8] == served.tokens("a")
    assert served.tokens("b") == direct(PROMPT, 12, (80,))


def test_what_cannot_be_forked() -> None:
    served = Served(config(4, 2, 1, num_blocks=64, max_logprobs=2))
    served.add("a", PROMPT, 9)
    served.until(lambda: len(served.tokens("a")) >= 3)
    fork, params = served.engine.fork, greedy(9)
    with pytest.raises(ValueError, match="'b' must be of a request that has not ended"):
        fork("b", "c")
    with pytest.raises(ValueError, match="'a' is in use"):
        fork("a", "a")
    with pytest.raises(ValueError, match=r"logprobs=1 must be None"):
        fork("a", "b", dataclasses.replace(params, logprobs=1))
    with pytest.raises(ValueError, match="n=2 must be 1"):
        fork("a", "b", dataclasses.replace(params, n=2))
    with pytest.raises(ValueError, match="max_tokens=3 allows 3 output tokens"):
        fork("a", "b", dataclasses.replace(params, max_tokens=3))
    served.finish()
    assert served.tokens("a") == direct(PROMPT, 9)
    served.add("short", PROMPT, 2)
    with pytest.raises(ValueError, match="has ended in the launches in flight"):
        for step in itertools.count():
            served.step()
            fork("short", f"{step}")


def test_forking_compiles_nothing_new() -> None:
    served = Served(JAX, executor=jax_executor())
    inner = served.recorder.inner
    inner.warmup(lambda shapes: shapes)
    before = served.stats()["compiles"]
    served.add("a", PROMPT, 9)
    served.until(lambda: len(served.tokens("a")) == 3)
    served.engine.fork("a", "b")
    served.finish()
    assert served.stats()["compiles"] == before
    assert next_token(PROMPT) == served.tokens("b")[0]


def test_whoever_is_copied_does_not_give_way_in_the_same_plan() -> None:
    """B = 4, five blocks. Once both have decoded, the source holds two blocks and the
    other, whose are full, two; the fork takes the last. The other ranks before the
    source, and would preempt it to grow; the copy has not been made yet."""
    order = {2: 0, 1: 1, 0: 2}  # fork, other, source
    policy = fcfs()._replace(
        rank=lambda state, view, now_s: (0, (order[view.index],)),
    )
    served = Served(config(4, 1, 1, num_blocks=5, max_num_seqs=3), policy=policy)
    served.add("source", PROMPT[:5], 8)
    served.add("other", PROMPT[::-1], 8)
    served.until(lambda: len(served.tokens("other")) == 2)
    served.engine.fork("source", "fork")
    served.step()
    assert served.of("preempted") == []
    assert served.stats()["running"] == 3
    served.finish()
    assert served.tokens("other") == direct(PROMPT[::-1], 8)
    for name in ("source", "fork"):
        assert served.tokens(name) == direct(PROMPT[:5], 8)
