"""How fast the engine serves four workloads, beside other engines in the same run.

Loads and warms up first, and prints how long that took. Rounds are interleaved: in each
of them every system serves every workload once, so that all meet the same disturbances
of the machine. jaxserve begins each round with one that is not timed, since a peer that
has just started warms up too.

Prints a JSON line a run, and a table with each system's median, best, CPU time, time to
first token and peak memory, and jaxserve's speed over the system's round by round; then
how far each workload is from what memory alone allows.

A peer is a command in an environment of its own. It is started once a round, warms up,
serves the workloads in place of {workloads}, as in P1,P2, and prints a JSON object a
line for each: `workload`, `out_tps`, and if it likes `cpu_s`, `ttft_p50_ms` and
`peak_rss_mb`.

  python -m experiments.peer_bench --workloads=P2,P3 --rounds=5 \\
      --peer='transformers=python run_hf.py {workloads} --reps 1'
"""

from __future__ import annotations

import json
import math
import resource
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

from absl import app, flags

from experiments import bench_workloads, common, memory_floor
from jaxserve import LLM, SamplingParams, metrics

flags.adopt_module_key_flags(common)  # so that --helpshort lists them
_WORKLOADS = flags.DEFINE_list("workloads", ["P1", "P2", "P3", "P4"], "Of P1 to P4.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Interleaved rounds.", lower_bound=1)
_PEERS = flags.DEFINE_multi_string(
    "peer", [], "NAME=COMMAND with {workloads} in it; may be given again."
)
_NO_CACHE = flags.DEFINE_bool(
    "without_prefix_caching", False, "Also run jaxserve without prefix caching."
)

Result = dict[str, Any]
Run = Callable[[list[str]], list[Result]]


def serve(llm: LLM, name: str) -> Result:
    """Serve a workload once, from an empty prefix cache."""
    workload = bench_workloads.make(name)
    params = [
        SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)
        for n in workload.output_tokens
    ]
    llm.reset_prefix_cache()
    before = llm.stats()
    cpu_s, start_s = time.process_time(), time.perf_counter()
    outputs = llm.generate(workload.prompts, params, use_tqdm=False)
    wall_s = time.perf_counter() - start_s
    used_cpu_s = time.process_time() - cpu_s
    after = llm.stats()
    spent = {key: after[key] - before[key] for key in after}
    ttft = [1e3 * o.metrics.ttft_s for o in outputs if o.metrics.ttft_s is not None]
    return {
        "workload": name,
        "wall_s": wall_s,
        "out_tps": sum(workload.output_tokens) / wall_s,
        "ttft_p50_ms": metrics.percentile(ttft, 50),
        "cpu_s": used_cpu_s,
        "steps": spent["steps"],
        "host_share": spent["host_s"] / wall_s,
        "prefix_hits_tokens": spent["prefix_hits_tokens"],
        "padded_tokens": spent["padded_tokens"],
        "compiles": spent["compiles"],
        **_memory(),
    }


def _memory() -> dict[str, int]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {"peak_rss_mb": usage.ru_maxrss // 1024}


def peer(command: str) -> Run:
    """A peer's command as a run."""

    def run(names: list[str]) -> list[Result]:
        done = subprocess.run(
            ["bash", "-c", command.replace("{workloads}", ",".join(names))],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{command!r} failed:\n{done.stderr[-2000:]}")
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        results = [json.loads(line) for line in lines]
        served = [result.get("workload") for result in results]
        if served != names:
            raise RuntimeError(
                f"{command!r} printed results of {served}; it must print one line of "
                f"JSON with `workload` for each of {names}, in order"
            )
        return results

    return run


def own(llm: LLM) -> Run:
    """jaxserve as a run."""

    def run(names: list[str]) -> list[Result]:
        serve(llm, "P1")  # untimed
        return [serve(llm, name) for name in names]

    return run


def systems(llm: LLM) -> dict[str, Run]:
    """What to run, by name, jaxserve first."""
    found = {"jaxserve": own(llm)}
    if _NO_CACHE.value:
        plain = common.make_llm(enable_prefix_caching=False)
        found["jaxserve, no prefix cache"] = own(plain)
    for text in _PEERS.value:
        name, _, command = text.partition("=")
        found[name] = peer(command)
    return found


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    start_s = time.perf_counter()
    llm = common.make_llm()
    ready_s = time.perf_counter() - start_s
    started = {"system": "jaxserve", "ready_s": ready_s, **_memory()}
    print(json.dumps(common.rounded(started)), flush=True)
    runs = systems(llm)
    rounds: dict[tuple[str, str], list[Result]] = {}
    for round_ in range(_ROUNDS.value):
        for system, run in runs.items():
            for result in run(_WORKLOADS.value):
                row = {"system": system, "round": round_, **result}
                print(json.dumps(common.rounded(row)), flush=True)
                rounds.setdefault((result["workload"], system), []).append(result)
    print("\n" + common.table([_summary(rounds, *key) for key in sorted(rounds)]))
    print("\n" + common.table(_floors(llm, rounds)))


def _floors(llm: LLM, rounds: dict[tuple[str, str], list[Result]]) -> list[Result]:
    """jaxserve's median beside the speed at which memory would be the only limit."""
    speed = memory_floor.bandwidth_bytes_s()
    weights, kv = memory_floor.sizes(llm.engine.model, llm.engine.params)
    rows = []
    for name in _WORKLOADS.value:
        workload = bench_workloads.make(name)
        seconds = memory_floor.decode_bytes(workload, weights, kv) / speed
        reached = statistics.median(r["out_tps"] for r in rounds[name, "jaxserve"])
        allowed = sum(workload.output_tokens) / seconds
        rows.append(
            {
                "workload": name,
                "memory GB/s": speed / 1e9,
                "memory allows tok/s": allowed,
                "jaxserve": reached,
                "share": reached / allowed,
            }
        )
    return rows


def _summary(
    rounds: dict[tuple[str, str], list[Result]], workload: str, system: str
) -> Result:
    """One line of the table."""
    results = rounds[workload, system]
    speeds = [result["out_tps"] for result in results]
    ours = [result["out_tps"] for result in rounds[workload, "jaxserve"]]
    ratios = [mine / other for mine, other in zip(ours, speeds, strict=True)]

    def median(field: str) -> float | None:
        values = [result.get(field, math.nan) for result in results]
        # A peer may list the values of its repetitions.
        flat = [v[0] if isinstance(v, list) else v for v in values]
        return None if any(map(math.isnan, flat)) else statistics.median(flat)

    return {
        "workload": workload,
        "system": system,
        "out tok/s": statistics.median(speeds),
        "best": max(speeds),
        "CPU s": median("cpu_s"),
        "TTFT p50 ms": median("ttft_p50_ms"),
        "peak MB": median("peak_rss_mb"),
        "jaxserve / it": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
    }


if __name__ == "__main__":
    app.run(main)
