"""Orders by what is cached: who goes first, who is passed how often, who keeps a place.

The queue of one slot: "busy" holds it while the others line up.
"""

from __future__ import annotations

import pytest

from jaxserve import EngineConfig
from jaxserve.scheduling.policies import (
    Policy,
    chain,
    prefix_affinity,
    prefix_sjf,
    priority,
)
from tests.engine.harness import Served, config, order
from tests.scheduling.policies.views import BLANK, ranked, views
from tests.serving import direct

LONG = [(7 * i) % 97 for i in range(100)]


def _config(**fields) -> EngineConfig:
    sizes = {"max_model_len": 128, "max_num_batched_tokens": 128, "num_blocks": 120}
    return config(4, 1, 1, **{**sizes, "max_num_seqs": 1, **fields})


def _after_busy(policy: Policy, prompts: dict[str, list[int]]) -> list[str]:
    """Who is admitted, first to last, of those that wait for a slot together; the
    first prompt is in the cache by then."""
    served = Served(_config(), policy=policy)
    served.run("warm", next(iter(prompts.values())), 1)
    served.add("busy", [90, 91], 3)
    served.step()
    for name, prompt in prompts.items():
        if name != "warm":
            served.add(name, prompt, 1)
    served.finish()
    return order(served, "admitted")[2:]


def test_fewest_uncached_tokens_go_first() -> None:
    """X has 100 tokens, 96 of them cached; Y has 10, none of them cached."""
    prompts = {"warm": LONG[:96], "y": [80] * 10, "x": LONG}
    assert _after_busy(prefix_sjf(), prompts) == ["x", "y"]
    prompts["y"] = [80] * 3
    assert _after_busy(prefix_sjf(), prompts) == ["y", "x"]


def test_the_longest_cached_prefix_goes_first() -> None:
    """With 16 tokens cached: c shares 12, b 4, the others nothing."""
    prompts = {
        "warm": LONG[:16],
        "a": [80] * 5,
        "b": [*LONG[:4], 80],
        "c": [*LONG[:12], *[81] * 40],
        "d": [82],
    }
    assert _after_busy(prefix_affinity(), prompts) == ["c", "b", "a", "d"]
    assert _after_busy(prefix_sjf(), prompts) == ["b", "d", "a", "c"]


@pytest.mark.parametrize("policy", [prefix_affinity, prefix_sjf])
def test_equals_are_served_as_they_came(policy) -> None:
    prompts = {"warm": [1] * 4, "a": [80] * 10, "b": [70] * 10, "c": [60] * 10}
    assert _after_busy(policy(), prompts) == ["a", "b", "c"]


def _stream(policy: Policy, steps: int, **fields) -> list[str]:
    """A long prompt at the start, and a prompt of 4 tokens with every step."""
    served = Served(_config(**fields), policy=policy)
    served.add("long", LONG, 1)
    for i in range(steps):
        served.add(f"{i}", [i % 97, 1, 2, 3], 1)
        served.step()
    return order(served, "admitted")


@pytest.mark.parametrize("launches", [1, 2, 3])
def test_a_stream_of_short_prompts_passes_a_long_one_so_often_at_most(launches) -> None:
    admitted = _stream(prefix_sjf(skip_limit=5), 12, launches_in_flight=launches)
    assert admitted[:7] == [*"01234", "long", "5"]


def test_without_a_bound_a_stream_of_short_prompts_starves_a_long_one() -> None:
    admitted = _stream(prefix_sjf(skip_limit=None), 1000)
    assert admitted == [f"{i}" for i in range(1000)]


def test_one_that_shares_nothing_is_passed_so_often_at_most() -> None:
    served = Served(_config(), policy=prefix_affinity(skip_limit=2))
    served.run("warm", LONG[:8], 1)
    served.add("busy", [90, 91], 3)
    served.step()
    served.add("lone", [80] * 9, 1)
    for i in range(6):
        served.add(f"{i}", [*LONG[:8], i], 1)
    served.finish()
    assert order(served, "admitted")[2:] == ["0", "1", "lone", "2", "3", "4", "5"]


@pytest.mark.parametrize("policy", [prefix_affinity, prefix_sjf])
def test_a_preempted_request_is_not_sorted_anew(policy) -> None:
    """Nothing of it is cached when it comes back, and a shorter one waits beside it."""
    served = Served(
        _config(enable_prefix_caching=False), policy=chain(priority(), policy())
    )
    served.add("long", LONG[:50], 4, priority=1)
    served.step()
    served.add("short", [80] * 4, 1, priority=1)
    served.add("urgent", [90], 1, priority=0)
    served.finish()
    assert order(served, "preempted") == ["long"]
    assert order(served, "admitted") == ["long", "urgent", "long", "short"]
    assert served.tokens("long") == direct(LONG[:50], 4)
    again = views(
        short={"prompt_tokens": 4, "arrival_s": 1.0, "cached_tokens": 3},
        long={"prompt_tokens": 90, "arrival_s": 2.0, "preemptions": 1},
    )
    assert ranked(policy(), again | {"r": BLANK._replace(index=9, running=True)}) == (
        "rlongshort"
    )


@pytest.mark.parametrize("policy", [prefix_affinity, prefix_sjf])
def test_only_those_that_have_never_run_are_ranked_at_every_plan(policy) -> None:
    state = policy().init()
    assert policy().until(state, BLANK, 2.5) == 2.5
    for has_run in ({"running": True}, {"preemptions": 1}):
        assert policy().until(state, BLANK._replace(**has_run), 2.5) is None
