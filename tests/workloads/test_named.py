"""The sweep's workloads: what a seed and a rate decide, and where traces come in."""

from __future__ import annotations

import json
import math
import pathlib
from collections import Counter

import pytest

from jaxserve.workloads import WORKLOADS, ideal_prefix_hit, make_workload, trace_path

NAMES = sorted(WORKLOADS)
RATED = [name for name in NAMES if name != "W1"]


def still(workload):
    return [job._replace(arrival_s=0.0) for job in workload]


def rate_of(name: str, rate: float) -> float | None:
    return None if name == "W1" else rate


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_makes_one_workload(name: str) -> None:
    made = make_workload(name, n=200, seed=3, rate=rate_of(name, 2.0))
    assert len(made) == 200
    assert made == make_workload(name, n=200, seed=3, rate=rate_of(name, 2.0))
    assert made != make_workload(name, n=200, seed=4, rate=rate_of(name, 2.0))
    times = [job.arrival_s for job in made]
    assert times == sorted(times) and times[0] >= 0
    assert min(min(job.prompt_tokens, job.output_tokens) for job in made) >= 1


@pytest.mark.parametrize("name", RATED)
def test_the_rate_scales_times_and_leaves_requests_alone(name: str) -> None:
    slow = make_workload(name, n=200, seed=3, rate=2.0)
    fast = make_workload(name, n=200, seed=3, rate=4.0)
    assert still(slow) == still(fast)
    assert [job.arrival_s for job in slow] == pytest.approx(
        [2 * job.arrival_s for job in fast], rel=1e-12
    )


@pytest.mark.parametrize("name", RATED)
def test_the_rate_is_in_requests_per_second(name: str) -> None:
    last = make_workload(name, n=5000, seed=0, rate=7.0)[-1].arrival_s
    # Five standard errors of 5000 gaps, whose CV is 1.1 at most.
    assert last == pytest.approx(5000 / 7, rel=5 * 1.1 / math.sqrt(5000))


@pytest.mark.parametrize(
    ("name", "own"),
    [("W4-code", 2.57), ("W4-conv", 5.53), ("W6", 3.91), ("W7a", 4.5), ("W7b", 2.5)],
)
def test_some_have_a_rate_of_their_own(name: str, own: float) -> None:
    made = make_workload(name, n=20, seed=0)
    assert made == make_workload(name, n=20, seed=0, rate=own)


# Shares of requests and how long they are at most. Of a lognormal: the median, and
# e^sigma times it one deviation higher.
CHAT = [(0.5, 70), (0.8413, 70 * math.exp(1.2)), (1, 2048)]
LMSYS = [(0.25, 41), (0.5, 140), (0.9, 395), (1, 511)]
HEAVY = [(0.5, 180), (0.8413, 180 * math.exp(1.14)), (1, 4096)]


@pytest.mark.parametrize(
    ("name", "prompts", "outputs"),
    [
        ("W1", CHAT, LMSYS),
        ("W2", CHAT, LMSYS),
        ("W3", CHAT, HEAVY),
        (
            "W4-conv",
            [(0.25, 396), (0.5, 1020), (0.9, 2734), (1, 14050)],
            [(0.25, 85), (0.5, 129), (0.9, 424), (1, 1000)],
        ),
        (
            "W4-code",
            [(0.25, 578), (0.5, 1469), (0.9, 5187), (1, 7437)],
            [(0.25, 9), (0.5, 13), (0.9, 55), (1, 1899)],
        ),
        (
            "W6",
            [(0.25, 277), (0.5, 11587), (0.9, 38611), (1, 191378)],
            [(0.25, 11), (0.5, 69), (0.9, 389), (1, 893)],
        ),
        (
            "W7b",
            [(0.25, 13), (0.5, 40), (0.9, 432), (1, 1021)],
            [(0.25, 62), (0.5, 211), (0.9, 513), (1, 977)],
        ),
    ],
)
def test_lengths_are_those_that_the_name_promises(name: str, prompts, outputs) -> None:
    n = 40_000
    made = make_workload(name, n=n, seed=0, rate=rate_of(name, 1.0))
    # Dvoretzky-Kiefer-Wolfowitz: beyond this with chance 1e-6. Prompts about one
    # document are equally long: 3.8 on average, as good as one in 2 * 3.8 - 1.
    bound = math.sqrt(math.log(2e6) / (2 * n))
    loose = bound * math.sqrt(6.6) if name == "W6" else bound
    for tokens, table, within in (
        ([job.prompt_tokens for job in made], prompts, loose),
        ([job.output_tokens for job in made], outputs, bound),
    ):
        for share, value in table:
            # Lengths are whole, so the given value is met within half a token.
            assert sum(t < value - 0.5 for t in tokens) / n <= share + within
            assert sum(t <= value + 0.5 for t in tokens) / n >= share - within
        assert max(tokens) <= table[-1][1]
        assert max(tokens) > table[-1][1] * 0.9


def test_w1_has_all_requests_at_once() -> None:
    made = make_workload("W1", n=50, seed=0)
    assert {job.arrival_s for job in made} == {0.0}
    # W2 is the same requests over time.
    assert still(made) == still(make_workload("W2", n=50, seed=0, rate=1.0))


def test_w7a_is_two_clients_of_90_and_180_per_minute() -> None:
    made = make_workload("W7a", n=2700, seed=0)  # ten minutes
    assert {(job.prompt_tokens, job.output_tokens) for job in made} == {(256, 256)}
    counts = Counter(job.user for job in made)
    assert counts["one"] == pytest.approx(900, abs=1)
    assert counts["two"] == pytest.approx(1800, abs=1)
    minute = Counter(job.user for job in made if 120 <= job.arrival_s < 180)
    assert minute == {"one": 90, "two": 180}


def test_w6_shares_as_much_as_the_trace() -> None:
    # Mooncake's synthetic trace: 64.0 % of the blocks, 65.1 % of the tokens, and 42.4 %
    # of the blocks in an LRU of 10,000. Seeds differ by a point or two.
    for seed in range(3):
        made = make_workload("W6", n=4000, seed=seed)
        assert ideal_prefix_hit(made) == pytest.approx((0.64, 0.651), abs=0.03)
        assert lru_hit(made, 10_000) == pytest.approx(0.424, abs=0.03)


def lru_hit(workload, capacity_blocks: int) -> float:
    """Share of blocks found, the deepest blocks of a prompt being the oldest."""
    cache: dict[int, None] = {}
    found = total = 0
    for job in workload:
        ids = job.chain.ids
        total += len(ids)
        found += next((k for k, i in enumerate(ids) if i not in cache), len(ids))
        for i in reversed(ids):
            cache.pop(i, None)
            cache[i] = None
        while len(cache) > capacity_blocks:
            del cache[next(iter(cache))]
    return found / total


def test_w7b_has_the_clients_of_the_trace() -> None:
    users = Counter(job.user for job in make_workload("W7b", n=15_000, seed=0))
    assert len(users) == 27
    # The busiest sends 296 of 1500.
    share = 296 / 1500
    error = math.sqrt(share * (1 - share) / 15_000)
    assert max(users.values()) / 15_000 == pytest.approx(share, abs=5 * error)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "lmsys_proxy_pred_first60k.csv").write_text(
        "output_tokens,pred_binary_class,pred_multi_class\n10,0,1\n20,1,2\n30,2,4\n"
    )
    (tmp_path / "azure_llm_2023_conv.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:50.99,396,109\n"
    )
    (tmp_path / "vtc_arena_27clients_10min.csv").write_text(
        "req_time_s,client,prompt_len,output_len\n0.0,5,1,2\n1.0,6,3,4\n4.0,5,5,6\n"
    )
    rows = [
        {"timestamp": t, "input_length": 600, "output_length": 9, "hash_ids": [0, i]}
        for i, t in ((1, 0), (2, 500), (3, 900))
    ]
    text = "\n".join(map(json.dumps, rows))
    (tmp_path / "mooncake_fast25_synthetic.jsonl").write_text(text)
    return tmp_path


@pytest.mark.parametrize(("name", "rate"), [("W1", None), ("W2", 3.0)])
def test_outputs_bring_their_predictions(
    folder: pathlib.Path, name: str, rate: float | None
) -> None:
    made = make_workload(name, n=3000, seed=0, rate=rate, data_dir=folder)
    classes = {10: ("0", "1"), 20: ("1", "2"), 30: ("2", "4")}
    for job in made:
        assert job.tags is not None
        assert tuple(job.tags.values()) == classes[job.output_tokens]
    counts = Counter(job.output_tokens for job in made)
    for count in counts.values():  # a third each, five standard errors
        assert count == pytest.approx(1000, abs=5 * math.sqrt(3000 * 2 / 9))


def test_azure_pairs_stay_together(folder: pathlib.Path) -> None:
    made = make_workload("W4-conv", n=400, seed=0, data_dir=folder)
    pairs = Counter((job.prompt_tokens, job.output_tokens) for job in made)
    assert set(pairs) == {(374, 44), (396, 109)}
    assert pairs[374, 44] == pytest.approx(200, abs=50)  # five standard errors
    # Its times are those of the twin: the stream of arrivals knows no file.
    twin = make_workload("W4-conv", n=400, seed=0)
    assert [job.arrival_s for job in made] == [job.arrival_s for job in twin]


def test_a_trace_with_prefixes_keeps_its_order(folder: pathlib.Path) -> None:
    made = make_workload("W6", n=2, seed=0, data_dir=folder)
    assert [job.chain.ids for job in made if job.chain] == [(0, 1), (0, 2)]
    assert [job.arrival_s for job in made] == [
        job.arrival_s for job in make_workload("W6", n=2, seed=0)
    ]


def test_the_arena_keeps_its_bursts(folder: pathlib.Path) -> None:
    # Three requests in 4 s are 0.75 per second; at 1.5 they take half the time.
    made = make_workload("W7b", n=3, seed=0, rate=1.5, data_dir=folder)
    assert [(job.arrival_s, job.user) for job in made] == [
        (0.0, "5"),
        (0.5, "6"),
        (2.0, "5"),
    ]
    fewer = make_workload("W7b", n=2, seed=0, rate=1.5, data_dir=folder)
    assert fewer == made[:2]


def test_where_the_requests_come_from_can_be_asked(folder: pathlib.Path) -> None:
    assert trace_path("W2", folder) == folder / "lmsys_proxy_pred_first60k.csv"
    assert trace_path("W2", None) is None
    assert trace_path("W3", folder) is None
    assert trace_path("W4-code", folder) is None  # the folder lacks it
    (folder / "empty").mkdir()
    assert make_workload("W4-code", n=5, seed=0, data_dir=folder / "empty") == (
        make_workload("W4-code", n=5, seed=0)
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "W9"}, r"^workload 'W9' must be one of \['W1', 'W2', "),
        ({"name": "W1", "rate": 1.0}, "^rate=1.0 must be None, .*; leave it out"),
        ({"name": "W2"}, "^rate=None must .*; give requests per second, for W2 has no"),
        ({"name": "W3", "rate": -1.0}, "^rate=-1.0 must"),
        ({"name": "W6", "n": 0}, "^n=0 must"),
        ({"name": "W6", "seed": -1}, "^seed=-1 must"),
        ({"name": "W6", "data_dir": "/nowhere"}, "^data_dir='/nowhere' must be a fold"),
    ],
)
def test_what_is_refused_is_named(given: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_workload(**({"n": 5, "seed": 0} | given))


@pytest.mark.parametrize("name", ["W6", "W7b"])
def test_a_trace_in_order_ends(folder: pathlib.Path, name: str) -> None:
    with pytest.raises(ValueError, match="^n=4 must be <= 3, the requests in .*; ask"):
        make_workload(name, n=4, seed=0, data_dir=folder)
