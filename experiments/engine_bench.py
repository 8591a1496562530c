"""How fast the engine serves four workloads, against baselines in the same run.

Loads and warms up first, and prints how long that took. Rounds are interleaved: each
serves every workload on every system once, so that all systems meet the same
disturbances of the machine. Prints a JSON line a run and a table with the median, the
best and the ratio to jaxserve round by round.

A peer is a command that serves a workload once and prints, as its last line, a JSON
object with `out_tps`:

  python -m experiments.engine_bench --workloads=P2,P3 --rounds=5 \\
      --peer='transformers=python run_hf.py {workload} --reps 1'
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

from absl import app, flags

from experiments import bench_workloads, common
from jaxserve import LLM, SamplingParams, metrics

flags.adopt_module_key_flags(common)  # so that --helpshort lists them
_WORKLOADS = flags.DEFINE_list("workloads", ["P1", "P2", "P3", "P4"], "Of P1 to P4.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Interleaved rounds.", lower_bound=1)
_PEERS = flags.DEFINE_multi_string(
    "peer", [], "NAME=COMMAND with {workload} in it; may be given again."
)
_NO_CACHE = flags.DEFINE_bool(
    "without_prefix_caching", False, "Also run jaxserve without prefix caching."
)

Run = Callable[[str], dict[str, Any]]


def serve(llm: LLM, name: str) -> dict[str, Any]:
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
    ttft = [o.metrics.ttft_s for o in outputs if o.metrics.ttft_s is not None]
    return {
        "wall_s": wall_s,
        "out_tps": sum(workload.output_tokens) / wall_s,
        "ttft_p50_s": metrics.percentile(ttft, 50),
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

    def run(name: str) -> dict[str, Any]:
        done = subprocess.run(
            ["bash", "-c", command.replace("{workload}", name)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{command!r} failed:\n{done.stderr[-2000:]}")
        return json.loads(done.stdout.strip().splitlines()[-1])

    return run


def systems() -> dict[str, Run]:
    """What to run, by name, jaxserve first."""
    start_s = time.perf_counter()
    llm = common.make_llm()
    ready_s = time.perf_counter() - start_s
    started = {"system": "jaxserve", "ready_s": ready_s, **_memory()}
    print(json.dumps(common.rounded(started)), flush=True)
    found: dict[str, Run] = {"jaxserve": lambda name: serve(llm, name)}
    if _NO_CACHE.value:
        plain = common.make_llm(enable_prefix_caching=False)
        found["jaxserve, no prefix cache"] = lambda name: serve(plain, name)
    for text in _PEERS.value:
        name, _, command = text.partition("=")
        found[name] = peer(command)
    return found


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    runs = systems()
    speeds: dict[tuple[str, str], list[float]] = {}
    for round_ in range(_ROUNDS.value):
        for name in _WORKLOADS.value:
            for system, run in runs.items():
                result = run(name)
                row = {"workload": name, "system": system, "round": round_, **result}
                print(json.dumps(common.rounded(row)), flush=True)
                speeds.setdefault((name, system), []).append(result["out_tps"])
    rows = []
    for (name, system), values in speeds.items():
        own = speeds[name, "jaxserve"]
        ratios = [mine / other for mine, other in zip(own, values, strict=True)]
        rows.append(
            {
                "workload": name,
                "system": system,
                "out tok/s median": statistics.median(values),
                "best": max(values),
                "jaxserve / it": statistics.median(ratios),
                "lowest": min(ratios),
                "highest": max(ratios),
            }
        )
    print("\n" + common.table(rows))


if __name__ == "__main__":
    app.run(main)
