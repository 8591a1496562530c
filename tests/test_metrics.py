"""Measurements, from events written by hand and from real runs."""

from __future__ import annotations

import json

import pytest

from jaxserve import metrics
from jaxserve.core import EVENT_FIELDS, Event
from jaxserve.metrics import RequestMetrics
from tests.engine.harness import Served, by_priority, config, preempt


def told(kind: str, ms: float, name: str, index: int, **data: object) -> Event:
    """An event at a millisecond; what is not given is zero."""
    fields = dict.fromkeys(EVENT_FIELDS[kind], 0) | {"index": index} | data
    return Event(kind, ms / 1000, name, fields)


def life(
    name: str,
    index: int,
    *,
    arrival: float,
    admitted: float,
    tokens: list[tuple[float, int]],
    prompt: int = 4,
    cached: int = 0,
    end: float | None = None,
) -> list[Event]:
    """The events of a request; tokens are (millisecond, how many)."""
    events = [
        told(
            "arrived",
            arrival,
            name,
            index,
            arrival_s=arrival / 1000,
            prompt_tokens=prompt,
        ),
        told("admitted", admitted, name, index, first=True, cached_tokens=cached),
    ]
    events += [told("progressed", ms, name, index, output_tokens=n) for ms, n in tokens]
    if end is not None:
        events.append(told("finished", end, name, index, reason="length"))
    return events


def launch(ms: float, **data: object) -> Event:
    return Event(
        "launch", ms / 1000, None, dict.fromkeys(EVENT_FIELDS["launch"], 0) | data
    )


def one(events: list[Event]) -> RequestMetrics:
    """The metrics of the only request."""
    (found,) = metrics.by_request(events).values()
    return found


# One request --------------------------------------------------------------------------


def test_me5_first_token_gaps_and_time_per_token() -> None:
    """ME5 (vllm#7242, #15106): TTFT among the gaps; a first chunk without a token."""
    events = life(
        "r",
        0,
        arrival=0,
        admitted=1,  # the role of a stream's first chunk is known here
        tokens=[(15, 0), (19, 1), (30, 1), (41, 1)],
        end=41,
    )
    r = one(events)
    assert r.ttft_s == pytest.approx(0.019)
    assert r.itl_s == pytest.approx((0.011, 0.011))
    assert r.tpot_s == pytest.approx((0.041 - 0.019) / 2)
    assert r.e2e_s == pytest.approx(0.041) and r.queue_s == pytest.approx(0.001)
    assert r.output_tokens == 3 and r.finish_reason == "length"


def test_me5_one_token_has_no_gap_and_no_time_per_token() -> None:
    """ME5: absent, not NaN and not 0 in the mean."""
    single = life("a", 0, arrival=2, admitted=3, tokens=[(20, 1)], end=20)
    r = one(single)
    assert r.itl_s == () and r.tpot_s is None and r.ttft_s == pytest.approx(0.018)
    more = life("b", 1, arrival=0, admitted=0, tokens=[(10, 1), (40, 1)], end=40)
    summary = metrics.summary(single + more)
    assert summary["tpot_s_mean"] == pytest.approx(0.030)
    assert summary["itl_s_mean"] == pytest.approx(0.030)
    alone = metrics.summary(single)
    assert alone["tpot_s_mean"] is alone["itl_s_p50"] is alone["itl_s_p99"] is None


def test_arrival_is_the_callers_word_and_tokens_of_a_launch_share_a_time() -> None:
    events = life("r", 0, arrival=5, admitted=9, tokens=[(20, 4), (36, 2)], end=36)
    # Seen by the engine at 8 ms, while it says it arrived at 5.
    events[0] = events[0]._replace(time_s=0.008)
    r = one(events)
    assert r.ttft_s == pytest.approx(0.015) and r.queue_s == pytest.approx(0.004)
    assert r.itl_s == pytest.approx((0, 0, 0, 0.016, 0))
    assert r.tpot_s == pytest.approx(0.016 / 5)


def test_what_did_not_happen_is_none() -> None:
    waiting = [told("arrived", 3, "r", 0, arrival_s=0.003, prompt_tokens=7)]
    r = one(waiting)
    assert r.queue_s is r.ttft_s is r.tpot_s is r.e2e_s is r.finish_reason is None
    assert r.itl_s == () and r.output_tokens == 0 and r.prompt_tokens == 7
    aborted = [*waiting, told("finished", 9, "r", 0, reason="abort")]
    r = one(aborted)
    assert r.ttft_s is r.queue_s is None and r.e2e_s == pytest.approx(0.006)
    assert r.finish_reason == "abort"
    empty = metrics.summary([])
    assert empty["requests"] == empty["output_tokens"] == empty["launches"] == 0
    kinds = ("queue_s", "ttft_s", "tpot_s", "e2e_s", "itl_s")
    for name in (f"{kind}_{x}" for kind in kinds for x in ("mean", "p50", "p99")):
        assert empty[name] is None
    for name in ("span_s", "output_tokens_per_s", "prefix_hit_rate", "host_s_per_step"):
        assert empty[name] is None


def test_resumptions_move_neither_the_queue_nor_the_hits() -> None:
    events = life("r", 0, arrival=0, admitted=10, tokens=[(20, 1)], prompt=8, cached=4)
    events += [
        told("preempted", 25, "r", 0),
        told("admitted", 50, "r", 0, first=False, cached_tokens=8),
        told("progressed", 60, "r", 0, output_tokens=1),
        told("finished", 60, "r", 0, reason="stop"),
    ]
    r = one(events)
    assert r.queue_s == pytest.approx(0.010) and r.cached_tokens == 4
    assert r.preemptions == 1 and r.itl_s == pytest.approx((0.040,))
    summary = metrics.summary(events)
    assert summary["prefix_hit_rate"] == 0.5 and summary["preemptions"] == 1


# Many ---------------------------------------------------------------------------------


def test_a_summary_by_hand() -> None:
    events = [
        *life("a", 0, arrival=0, admitted=0, tokens=[(10, 1), (20, 1)], prompt=10),
        launch(20, steps=2, padded_tokens=3, host_s=0.004, compiles=1),
        *life("b", 1, arrival=5, admitted=10, tokens=[(30, 2)], prompt=6, cached=4)[:2],
        told("progressed", 30, "b", 1, output_tokens=2),
        told("finished", 30, "b", 1, reason="stop"),
        told("finished", 40, "a", 0, reason="length"),
        launch(40, steps=0, padded_tokens=1, host_s=0.001, compiles=0),
        told("arrived", 41, "c", 2, arrival_s=0.041, prompt_tokens=100),
    ]
    summary = metrics.summary(events)
    assert (summary["requests"], summary["finished"]) == (3, 2)
    assert summary["prompt_tokens"] == 116 and summary["output_tokens"] == 4
    assert summary["span_s"] == pytest.approx(0.040)
    assert summary["output_tokens_per_s"] == pytest.approx(100)
    assert summary["prefix_hit_rate"] == 4 / 16  # c has asked for nothing yet
    assert (summary["launches"], summary["steps"], summary["padded_tokens"]) == (
        2,
        2,
        4,
    )
    assert summary["host_s_per_step"] == pytest.approx((0.002 + 0.001) / 2)
    assert summary["compiles"] == 1
    assert summary["ttft_s_mean"] == pytest.approx((0.010 + 0.025) / 2)
    assert summary["ttft_s_p50"] == pytest.approx(0.0175)
    assert summary["ttft_s_p99"] == pytest.approx(0.010 + 0.99 * 0.015)
    assert summary["e2e_s_mean"] == pytest.approx((0.040 + 0.025) / 2)
    assert summary["queue_s_mean"] == pytest.approx(0.0025)
    assert summary["itl_s_mean"] == pytest.approx(0.005)  # 10 ms and 0


def test_throughput_counts_tokens_and_time_of_the_same_requests() -> None:
    """The span starts with the first arrival, also of one that has not ended."""
    events = [
        *life("long", 0, arrival=0, admitted=0, tokens=[(500, 50), (1900, 50)]),
        *life("short", 1, arrival=1800, admitted=1800, tokens=[(1900, 1)], end=2000),
    ]
    summary = metrics.summary(events)
    assert summary["output_tokens"] == 101
    assert summary["output_tokens_per_s"] == pytest.approx(101 / 2.0)


def test_percentiles_interpolate() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert [metrics.percentile(values, q) for q in (0, 50, 100)] == [1.0, 2.5, 4.0]
    assert metrics.percentile(values, 99) == pytest.approx(3.97)
    assert values == [4.0, 1.0, 3.0, 2.0]
    assert metrics.percentile([7.0], 99) == 7.0 and metrics.percentile([], 50) is None
    assert metrics.mean([]) is None and metrics.mean([1.0, 2.0]) == 1.5


def test_an_id_that_comes_again_is_another_request() -> None:
    events = [
        *life("r", 0, arrival=0, admitted=0, tokens=[(10, 1)], end=10),
        *life("r", 1, arrival=20, admitted=20, tokens=[(50, 1)], end=50),
        *life("s", 2, arrival=20, admitted=20, tokens=[(40, 1)], end=40),
        *life("r", 3, arrival=60, admitted=60, tokens=[(61, 1)], end=61),
    ]
    found = metrics.by_request(events)
    assert {name: r.ttft_s for name, r in found.items()} == pytest.approx(
        {"r": 0.010, "r#2": 0.030, "s": 0.020, "r#3": 0.001}
    )


# Real runs ----------------------------------------------------------------------------


def test_an_abort_before_arrival_breaks_no_measurement() -> None:
    """It has no other event; an earlier request of its id is not touched."""
    served = Served(config(4, 1, 1, num_blocks=20))
    served.run("r", [1] * 5, 3)
    served.add("r", [1] * 5, 3, arrival_time=9.0)
    served.add("never", [1] * 5, 3, arrival_time=9.0)
    assert served.engine.abort_request("r") and served.engine.abort_request("never")
    served.finish()
    found = metrics.by_request(served.events)
    assert found["r"].finish_reason == "length" and found["r"].output_tokens == 3
    assert sum(r.finish_reason == "abort" for r in found.values()) in (0, 2)
    assert metrics.summary(served.events)["output_tokens"] == 3
    assert served.reason("never") == "abort"


def test_the_caller_and_the_events_tell_the_same() -> None:
    served = Served(
        config(4, 2, 2, num_blocks=20, max_num_seqs=1), policy=by_priority()
    )
    served.run("warm", [1] * 9, 1)
    served.add("r", [1] * 9, 9)
    served.until(lambda: len(served.tokens("r")) > 2)
    preempt(served)
    served.finish()
    found = metrics.by_request(served.events)
    for name, output in served.outputs.items():
        assert found[name] == output.metrics
        assert output.metrics.output_tokens == len(output.outputs[0].token_ids)
    r = found["r"]
    assert r.preemptions == 1 and r.cached_tokens == 8 and r.prompt_tokens == 9
    firsts = [e.time_s for e in served.of("progressed", "r") if e.data["output_tokens"]]
    assert r.token_times_s[0] == firsts[0] and r.finished_s == firsts[-1]
    summary = metrics.summary(served.events)
    stats = served.stats()
    for name in ("launches", "steps", "padded_tokens", "output_tokens", "preemptions"):
        assert summary[name] == stats[name]
    assert summary["prefix_hit_rate"] == pytest.approx(
        stats["prefix_hits_tokens"] / stats["prefix_queries_tokens"]
    )


def test_events_are_lines_of_json() -> None:
    served = Served(config(4, 1, 2, num_blocks=20), policy=by_priority())
    served.add("a", [1] * 9, 3, priority=2)
    served.add("b", [2] * 5, 7)
    served.step()
    preempt(served)  # a gives way, and comes back
    served.engine.abort_request("b")
    served.finish()
    kinds = set()
    for event in served.events:
        line = json.loads(json.dumps(event.json()))
        kinds.add(line["kind"])
        assert line.pop("kind") == event.kind
        assert line.pop("time_s") == event.time_s
        assert line.pop("request_id") == event.request_id
        index = set() if event.kind == "launch" else {"index"}
        assert line.keys() == set(EVENT_FIELDS[event.kind]) | index
    assert kinds == EVENT_FIELDS.keys()


def test_launch_events_account_for_every_position() -> None:
    """Tokens computed and padded are all the positions of the compiled steps."""
    served = Served(
        config(4, 1, 3, num_blocks=40, max_num_seqs=3, max_num_batched_tokens=10)
    )
    for i, (prompt, tokens) in enumerate([(7, 5), (12, 2), (1, 9), (4, 4)]):
        served.add(f"{i}", [i + 1] * prompt, tokens)
    served.finish()
    computed = 0
    for event in served.of("launch"):
        x = event.data
        assert x["prefill_tokens"] == sum(n for _, n, _ in x["slots"])
        assert x["decode_rows"] == sum(not n for _, n, _ in x["slots"])
        assert x["decode_tokens"] == sum(n for _, _, n in x["slots"])
        positions = x["token_bucket"] + max(0, x["steps"] - 1) * x["row_bucket"]
        # A row that samples in the mixed step computes no position of its own for it.
        mixed = x["prefill_tokens"] + x["decode_rows"]
        further = sum(max(0, n - 1) for _, _, n in x["slots"])
        assert x["padded_tokens"] == positions - mixed - further
        computed += x["prefill_tokens"]
    assert computed == 7 + 12 + 1 + 4
    assert served.stats()["prefill_tokens"] == computed


# Comparing policies -------------------------------------------------------------------


def test_latency_per_token_slowdown_and_the_longest_wait_by_hand() -> None:
    """10 ms to come, tokens at 30, 40 and 90, ended at 100: 90 ms of E2E for three."""
    times = [(30.0, 1), (40.0, 1), (90.0, 1)]
    r = one(life("r", 0, arrival=10, admitted=20, tokens=times, end=100))
    assert r.normalized_latency_s == pytest.approx(0.030)
    assert r.max_itl_s == pytest.approx(0.050)
    assert r.longest_wait_s == pytest.approx(0.050)
    assert r.slowdown(0.045) == pytest.approx(2.0)
    late = one(life("r", 0, arrival=0, admitted=0, tokens=[(70, 1), (75, 1)], end=75))
    assert late.longest_wait_s == pytest.approx(0.070)  # for the first token


def test_what_is_not_measured_yet_is_none() -> None:
    single = one(life("r", 0, arrival=0, admitted=0, tokens=[(20, 1)]))
    assert single.max_itl_s is single.normalized_latency_s is None
    assert single.slowdown(1.0) is None
    assert single.longest_wait_s == pytest.approx(0.020)
    none = one(life("r", 0, arrival=0, admitted=0, tokens=[], end=5))
    assert none.longest_wait_s is none.normalized_latency_s is None


def test_jains_index_by_hand() -> None:
    """Two clients served 1 : 2 are 9/10 fair; one of n who has all, 1/n."""
    assert metrics.jain([1.0, 2.0]) == pytest.approx(0.9)
    assert metrics.jain([7.0, 7.0, 7.0]) == pytest.approx(1.0)
    assert metrics.jain([5.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert metrics.jain([]) is metrics.jain([0.0, 0.0]) is None
