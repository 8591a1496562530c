"""The sweep: its measures by hand, what identifies a run, and a tiny one to its end."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import random
import subprocess
import sys

import pytest

from experiments import (
    fit_cost,
    live_runs,
    saturation,
    sweep_picture,
    sweep_report,
    sweep_runs,
    sweep_stats,
    sweep_store,
)
from experiments.fit_cost import Step
from experiments.sweep_runs import Run
from jaxserve import EngineConfig
from jaxserve.core import EVENT_FIELDS, Event
from jaxserve.executors.cost_model import LinearCost
from jaxserve.metrics import RequestMetrics
from jaxserve.scheduling.policies import View, fcfs, get_policy, hrrn
from jaxserve.simulation import simulate
from jaxserve.workloads import Job, make_workload
from tests.scheduling.policies.views import BLANK

ROOT = pathlib.Path(__file__).resolve().parents[2]
COST = LinearCost(fixed_s=0.007, token_s=0.0001, context_token_s=1e-6, floor_s=0.011)
CONFIG = EngineConfig(
    max_model_len=4096,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    num_blocks=2048,
    enable_prefix_caching=False,
)


def a_run(**fields: object) -> Run:
    values: dict = {
        "executor": "sim",
        "policy": "fcfs",
        "policy_source": "x",
        "workload": "W2",
        "trace": None,
        "n": 60,
        "seed": 0,
        "scale": 1,
        "load": None,
        "rate_rps": None,
        "engine": CONFIG,
        "cost": COST,
    }
    return Run(**(values | fields))


def served(
    arrival: float, tokens: list[float], user: str | None = None, prompt: int = 10
) -> RequestMetrics:
    """A request admitted half a second before its first token, ended at its last."""
    return RequestMetrics(
        arrival_s=arrival,
        admitted_s=tokens[0] - 0.5,
        finished_s=tokens[-1],
        token_times_s=tuple(tokens),
        prompt_tokens=prompt,
        user=user,
    )


# Measures -----------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("output", [1, 2, 50])
def test_alone_is_what_a_simulation_of_the_request_alone_takes(
    prompt: int, output: int
) -> None:
    (one,) = simulate((Job(0.0, prompt, output),), CONFIG, fcfs(), COST).requests
    alone = sweep_stats.alone_s(COST, 32, prompt, output)
    assert one.slowdown(alone) == pytest.approx(1.0)


def test_a_run_by_hand() -> None:
    requests = [
        served(0.0, [1.0, 2.0, 4.0], "a"),
        served(1.0, [2.0, 3.0], "b", prompt=20),
    ]
    result = sweep_stats.measure(
        requests, [2.0, 0.5], preemptions=3, recomputed_tokens=40
    )
    assert result["ttft_s_mean"] == pytest.approx(1.0)
    assert result["tpot_s_mean"] == pytest.approx((1.5 + 1.0) / 2)
    assert result["max_itl_s_p50"] == pytest.approx(1.5)  # of 2 and 1
    assert result["e2e_s_mean"] == pytest.approx((4.0 + 2.0) / 2)
    assert result["s_per_token_mean"] == pytest.approx((4 / 3 + 2 / 2) / 2)
    assert result["slowdown_mean"] == pytest.approx((2.0 + 4.0) / 2)
    assert result["slowdown_p99"] == pytest.approx(2.0 + 0.99 * 2.0)
    assert result["output_tokens_per_s"] == pytest.approx(5 / 4)
    assert result["requests_per_s"] == pytest.approx(2 / 4)
    assert result["starvation_s"] == pytest.approx(2.0)
    assert result["preemptions"] == 3 and result["recomputed_tokens"] == 40
    # Until the last arrival, at 1 s: a has 10 prompt tokens and one output token; b was
    # admitted after it.
    assert result["jain"] == pytest.approx(0.5)


def test_service_counts_what_came_until_then() -> None:
    requests = [
        served(0.0, [1.0, 2.0, 3.0], "a", prompt=5),
        served(0.0, [2.5, 9.0], "b", prompt=7),
        served(0.0, [1.0], None),
    ]
    found = sweep_stats.service_by_user(requests, until_s=2.0)
    assert found == {"a": 5 + 2 * 2, "b": 7}


def test_a_run_without_users_has_no_fairness() -> None:
    requests = [served(0.0, [1.0])]
    result = sweep_stats.measure(requests, [1.0], preemptions=0, recomputed_tokens=0)
    assert result["jain"] is None and result["tpot_s_mean"] is None


# Intervals ----------------------------------------------------------------------------


def test_the_bootstrap_of_a_large_sample_is_the_textbook_interval() -> None:
    """mean +- 1.96 s / sqrt(n), for means of many values are normal."""
    rng = random.Random(1)
    values = [rng.gauss(5.0, 2.0) for _ in range(400)]
    interval = sweep_stats.bootstrap(values)
    assert interval == sweep_stats.bootstrap(values)  # seeded
    mean = sum(values) / 400
    half = 1.96 * (sum((v - mean) ** 2 for v in values) / 400) ** 0.5 / 20
    assert interval == pytest.approx((mean - half, mean + half), abs=0.02)


def test_the_bootstrap_of_few_values() -> None:
    """Of {0, 1} the mean of two draws is 0, 1/2 or 1 with chances 1/4, 1/2, 1/4."""
    assert sweep_stats.bootstrap([0.0, 1.0]) == (0.0, 1.0)
    assert sweep_stats.bootstrap([3.0, 3.0, 3.0]) == pytest.approx((3.0, 3.0))
    assert sweep_stats.bootstrap([3.0]) is sweep_stats.bootstrap([]) is None


def test_paired_ratios_are_of_the_same_seed() -> None:
    """Seeds differ a hundredfold; the ratio is 2 in each."""
    ratio = sweep_stats.paired([2.0, 20.0, 200.0], [1.0, 10.0, 100.0])
    assert ratio is not None and ratio.mean == pytest.approx(2.0)
    assert ratio.interval == pytest.approx((2.0, 2.0))
    ratio = sweep_stats.paired([1.0, 4.0], [1.0, 1.0])
    assert ratio is not None and ratio.mean == pytest.approx(2.0)  # geometric
    assert (ratio.low, ratio.high) == pytest.approx((1.0, 4.0))
    assert sweep_stats.paired([1.0, 0.0], [1.0, 1.0]) is None
    assert sweep_stats.paired([None], [1.0]) is None
    with pytest.raises(ValueError):
        sweep_stats.paired([1.0, 2.0], [1.0])


# Saturation ---------------------------------------------------------------------------


def test_the_steady_rate_of_a_server_known_by_arithmetic() -> None:
    """4 slots, 10 tokens of 11 ms each, prompts that fit into a step: 4 / 0.11 s."""
    cost = LinearCost(fixed_s=0.0, token_s=0.0, floor_s=0.011)
    jobs = (Job(0.0, 1, 10),) * 80
    requests = simulate(jobs, CONFIG, fcfs(), cost).requests
    assert sweep_stats.steady_rate(requests) == pytest.approx(4 / 0.11)


def test_too_few_requests_have_no_steady_rate() -> None:
    requests = simulate((Job(0.0, 1, 10),) * 4, CONFIG, fcfs(), COST).requests
    with pytest.raises(ValueError, match="4 requests must be many more than the slots"):
        sweep_stats.steady_rate(requests)


def test_below_saturation_the_queue_stays_short_and_above_it_grows(
    tmp_path: pathlib.Path,
) -> None:
    base = a_run(n=200)
    path = tmp_path / "runs.jsonl"
    rate = saturation.saturation_rps(base, path, None)
    assert len(path.read_text().splitlines()) == saturation.SEEDS["sim"]

    def growth(load: float) -> float:
        """Mean wait in the last quarter less that in the second, in seconds."""
        waits = [0.0, 0.0]
        for seed in range(3):
            jobs = make_workload("W2", n=200, seed=seed, rate=load * rate)
            requests = simulate(jobs, CONFIG, fcfs(), COST).requests
            for i, part in enumerate((requests[50:100], requests[150:])):
                waits[i] += sum(r.queue_s or 0.0 for r in part) / 150
        return waits[1] - waits[0]

    service_s = 4 / rate  # of a request, with all slots full
    assert growth(0.8) < service_s < growth(1.3)


# Runs ---------------------------------------------------------------------------------


def test_the_key_changes_with_every_field() -> None:
    other = {
        "executor": "jax",
        "policy": "mlfq",
        "policy_source": "y",
        "workload": "W3",
        "trace": "file.csv",
        "n": 61,
        "seed": 1,
        "scale": 2,
        "load": 0.9,
        "rate_rps": 3.0,
        "engine": None,
        "cost": None,
    }
    assert other.keys() == {f.name for f in dataclasses.fields(Run)}
    keys = {a_run().key, a_run().key}
    assert len(keys) == 1
    for field, value in other.items():
        if value is not None:
            keys.add(a_run(**{field: value}).key)
    for field, value in dataclasses.asdict(COST).items():
        keys.add(a_run(cost=dataclasses.replace(COST, **{field: value + 1e-9})).key)
    changes = {"max_num_seqs": 5, "prefill": "decode_first", "num_scheduler_steps": 2}
    for field, value in changes.items():
        engine = dataclasses.replace(CONFIG, **{field: value})
        keys.add(a_run(engine=engine).key)
    assert len(keys) == 1 + 10 + 4 + 3


def test_a_policy_is_known_by_the_file_that_it_is_in(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "mine.py"
    text = "from jaxserve.scheduling.policies import fcfs\n\n"
    text += "def rank(state, view, now_s):\n    return 0, (view.index,)\n\n"
    text += "mine = fcfs()._replace(rank=rank)\n"
    path.write_text(text)
    first = sweep_runs.policy_source(f"{path}:mine")
    assert first == sweep_runs.policy_source(f"{path}:mine")
    assert first != sweep_runs.policy_source("fcfs")
    path.write_text(text.replace("(view.index,)", "(-view.index,)"))
    assert first != sweep_runs.policy_source(f"{path}:mine")


def test_a_second_sweep_runs_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "runs.jsonl"
    runs = [a_run(seed=seed, rate_rps=2.0) for seed in (0, 1)]
    first = sweep_store.run_all(runs[:1], path, None, processes=1)
    results = sweep_store.run_all(runs, path, None, processes=1)
    assert results[:1] == first and results[0] != results[1]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["key"] for line in lines] == [run.key for run in runs]
    assert lines[0]["run"]["engine"]["max_num_seqs"] == 4
    monkeypatch.setattr(sweep_runs, "execute", lambda run, data_dir: 1 / 0)
    assert sweep_store.run_all(runs[::-1], path, None) == results[::-1]


def test_a_line_that_was_cut_off_is_run_again(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "runs.jsonl"
    runs = [a_run(seed=seed, rate_rps=2.0) for seed in (0, 1)]
    whole = sweep_store.run_all(runs, path, None, processes=1)
    path.write_text(path.read_text()[:-9])
    assert list(sweep_store.read_results(path)) == [runs[0].key]
    assert sweep_store.run_all(runs, path, None, processes=1) == whole
    assert list(sweep_store.read_results(path)) == [run.key for run in runs]


def test_processes_change_nothing(tmp_path: pathlib.Path) -> None:
    runs = [a_run(seed=seed, rate_rps=2.0) for seed in (0, 1, 2)]
    one = sweep_store.run_all(runs, tmp_path / "1.jsonl", None, processes=1)
    assert sweep_store.run_all(runs, tmp_path / "2.jsonl", None, processes=2) == one


def test_a_run_of_a_trace_needs_the_trace(tmp_path: pathlib.Path) -> None:
    name = "lmsys_proxy_pred_first60k.csv"
    with pytest.raises(ValueError, match=f"trace='{name}' must be in data_dir"):
        sweep_runs.workload_of(a_run(trace=name), str(tmp_path))


def test_scaled_lengths_and_loads() -> None:
    whole = sweep_runs.workload_of(a_run(rate_rps=2.0), None)
    assert whole == make_workload("W2", n=60, seed=0, rate=2.0)
    quarter = sweep_runs.workload_of(a_run(scale=4), None)
    assert {job.arrival_s for job in quarter} == {0.0}
    for job, small in zip(whole, quarter, strict=True):
        assert small.output_tokens == max(1, job.output_tokens // 4)
        assert small.prompt_tokens == max(1, job.prompt_tokens // 4)


def test_a_policy_does_not_see_the_truth_in_max_tokens() -> None:
    """HRRN ranks by max_tokens. If that were the true length, it would take the shorter
    of two that wait: it takes the one that came first.
    """
    jobs = (Job(0.0, 5, 50), Job(0.001, 5, 50), Job(0.002, 5, 10))
    config = dataclasses.replace(CONFIG, max_num_seqs=1)

    requests = simulate(jobs, config, hrrn(), COST).requests
    admitted = [r.admitted_s or 0.0 for r in requests]
    assert admitted == sorted(admitted)


def test_a_blind_policy_sees_another_max_tokens_and_all_else() -> None:
    seen: list[View] = []

    def rank(state, view, now_s):
        seen.append(view)
        return 0, (view.arrival_s, view.index)

    view = BLANK._replace(prompt_tokens=10, max_output_tokens=7)
    policy = live_runs.blind(fcfs()._replace(rank=rank), 4096)
    assert policy.rank(None, view, 1.0) == (0, (0.0, 0))
    assert seen == [view._replace(max_output_tokens=4086)]


def test_blinding_changes_nothing_else() -> None:
    jobs = make_workload("W3", n=30, seed=0, rate=9.0)
    truth = {i: job.output_tokens for i, job in enumerate(jobs)}
    for spec in ("fcfs", "mlfq", "sjf:oracle", "srpt:oracle", "fair_share"):
        runs = [
            simulate(jobs, CONFIG, policy, COST).requests
            for policy in (
                get_policy(spec, truth=truth),
                live_runs.blind(get_policy(spec, truth=truth), 4096),
            )
        ]
        assert runs[0] == runs[1]


# The report ---------------------------------------------------------------------------


def results() -> dict[tuple[float, str], list[dict[str, float | None]]]:
    found = {}
    for load in (0.75, 1.15):
        for policy, times in (("fcfs", 1.0), ("mine", 4.0)):
            requests = [served(0.0, [1.0 / times, 3.0 / times])]
            one = sweep_stats.measure(
                requests, [0.5], preemptions=0, recomputed_tokens=0
            )
            found[load, policy] = [one, one]
    return found


def test_the_tables_say_what_was_measured() -> None:
    text = sweep_report.text(results(), title="A title")
    lines = text.splitlines()
    assert lines[0] == "A title"
    mine = [line.split() for line in lines if line.split()[:2] == ["0.75", "mine"]]
    ttft = mine[0][2:7]
    assert ttft == ["0.25", "/", "0.25", "/", "0.25"]
    ratio = mine[2][2:5]
    assert ratio == ["4.00", "[4.00,", "4.00]"] and mine[2][5] == "4.00..4.00"
    alone = {key: runs for key, runs in results().items() if key[1] == "fcfs"}
    assert "shorter" not in sweep_report.text(alone, title="")


def test_the_picture_is_a_picture(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "pictures" / "sweep.png"
    sweep_picture.draw(results(), title="A title", path=path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_tiny_sweep_from_the_command_line(tmp_path: pathlib.Path) -> None:
    command = [
        *(sys.executable, "-m", "experiments.policy_sweep", "--workload=W7a"),
        *("--n=60", "--seeds=2", "--loads=0.8,1.5", "--max_num_seqs=4"),
        *("--policies=fcfs,fair_share,sjf:oracle", f"--out_dir={tmp_path}"),
    ]
    told = []
    for _ in range(2):
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        )
        told.append((done.stdout, (tmp_path / "runs.jsonl").read_text()))
    assert told[0] == told[1]  # nothing ran again, and it says the same
    runs = [json.loads(line) for line in told[0][1].splitlines()]
    assert len(runs) == 5 + 2 * 3 * 2
    assert (tmp_path / "tables.txt").read_text() + "\n" in told[0][0] + "\n"
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    jain = {
        run["run"]["policy"]: run["result"]["jain"]
        for run in runs
        if run["run"]["load"] == 1.5
    }
    assert jain["fcfs"] < jain["fair_share"] <= 1


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--policies=fcfs,sjf", "must call sjf(predictor"),
        ("--policies=fcfs,,mlfq", "must hold a policy before and after each ,"),
        ("--policies=no_such_policy", "known are"),
        ("--loads=0.9,high", "must be numbers > 0"),
        ("--loads=0", "must be numbers > 0"),
        ("--cost=h100", "must be one of"),
        ("--num_blocks=0", "num_blocks=0 must be an integer >= 1"),
    ],
)
def test_flags_that_mean_nothing_run_nothing(
    flag: str, says: str, tmp_path: pathlib.Path
) -> None:
    command = [sys.executable, "-m", "experiments.policy_sweep", flag]
    done = subprocess.run(
        [*command, f"--out_dir={tmp_path / 'out'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and says in done.stdout + done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "out").exists()


# Fitting ------------------------------------------------------------------------------


def test_a_fit_finds_the_costs_that_made_the_log() -> None:
    cost = LinearCost(fixed_s=0.02, token_s=0.0003, context_token_s=4e-6)
    shapes = [(64, 0, 0), (0, 4, 100), (0, 16, 4000), (32, 8, 900), (0, 1, 17)]
    log = [Step(*shape, cost.step_s(*shape)) for shape in shapes]
    found, r2 = fit_cost.least_squares(log)
    assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(cost))
    assert r2 == pytest.approx(1.0)


def test_a_cost_is_never_negative() -> None:
    """Longer contexts were faster here: the best cost of one is then nothing."""
    log = [Step(0, 1, 0, 0.2), Step(0, 1, 100, 0.1), Step(0, 1, 200, 0.0)]
    found, r2 = fit_cost.least_squares(log)
    assert found.context_token_s == 0
    assert found.step_s(0, 1, 0) == pytest.approx(0.1) and r2 == pytest.approx(0.0)


def test_context_tokens_by_hand() -> None:
    """Prompts of 5 (in two chunks) and 3; one decode row, then two."""

    def launch(ms: float, began: float, slots: list[list[int]]) -> Event:
        data = {
            "slots": slots,
            "submitted_s": began / 1000,
            "token_bucket": 8,
            "prefill_tokens": sum(n for _, n, _ in slots),
            "decode_rows": sum(not n for _, n, _ in slots),
        }
        return Event("launch", ms / 1000, None, data)

    def admitted(slot: int) -> Event:
        fields = dict.fromkeys(EVENT_FIELDS["admitted"], 0) | {"slot": slot}
        return Event("admitted", 0.0, "r", fields)

    log = fit_cost.steps(
        [
            admitted(0),
            launch(10, 1, [[0, 4, 0]]),
            launch(20, 11, [[0, 1, 1]]),
            admitted(1),
            launch(35, 21, [[0, 0, 1], [1, 3, 1]]),
            launch(40, 36, [[0, 0, 1], [1, 0, 1]]),
            Event("launch", 0.041, None, {"slots": [], "token_bucket": 0}),
        ]
    )
    shapes = [(4, 0, 0), (1, 0, 0), (3, 1, 6), (0, 2, 7 + 4)]
    assert [step[:3] for step in log] == shapes
    assert [step.seconds for step in log] == pytest.approx([0.009, 0.010, 0.015, 0.005])


def test_the_log_of_a_simulation_gives_its_cost_back() -> None:
    events: list[Event] = []
    cost = LinearCost(fixed_s=0.02, token_s=0.0003, context_token_s=4e-6)
    jobs = tuple(Job(0.0, 5 + 7 * i % 40, 3 + 5 * i % 30) for i in range(20))
    simulate(jobs, CONFIG, fcfs(), cost, jump=False, on_event=events.append)
    found, r2 = fit_cost.least_squares(fit_cost.steps(events))
    assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(cost))
    assert r2 == pytest.approx(1.0)
