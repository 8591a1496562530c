"""The flags of a sweep, and the run that they describe.

Owns flags alone: what they are for is in `sweep_runs`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from absl import flags

from experiments import sweep_runs
from experiments.sweep_runs import Run
from jaxserve import EngineConfig
from jaxserve.executors.cost_model import get_profile
from jaxserve.workloads import WORKLOADS, make_workload, trace_path

EXECUTOR = flags.DEFINE_enum(
    "executor", "sim", ["sim", "jax"], "Simulated time, or SmolLM2 in real time."
)
_WORKLOAD = flags.DEFINE_enum(
    "workload",
    "W2",
    [name for name in WORKLOADS if name != "W1"],  # all at once: it has no load
    "See jaxserve/workloads/named.py.",
)
_N = flags.DEFINE_integer(
    "n", None, "Requests of a run; default 4000, 96 on jax.", lower_bound=1
)
_SCALE = flags.DEFINE_integer(
    "scale", None, "Divides all lengths; default 1, 4 on jax.", lower_bound=1
)
_COST = flags.DEFINE_string(
    "cost", None, "Profile of a step's time; default a100-8b, smollm2-cpu on jax."
)
flags.DEFINE_enum(
    "prefill", "chunked", ["chunked", "prefill_first", "decode_first"], "See config.py."
)
flags.DEFINE_enum("batching", "continuous", ["continuous", "static"], "See config.py.")
flags.DEFINE_integer("max_chunk_tokens", None, "Of a request in a step.")
DATA_DIR = flags.DEFINE_string(
    "data_dir", None, "Folder with traces; without them, twins are drawn."
)
OUT_DIR = flags.DEFINE_string("out_dir", "sweep", "For results, table and picture.")

# By executor; they replace the defaults above, and those of `common`, whose flags are
# for one model on one machine.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "sim": {
        "n": 4000,
        "scale": 1,
        "cost": "a100-8b",
        "max_num_seqs": 64,
        "max_model_len": 16384,
        # 131,072 B of KV a token: 59 GB, beside 16 GB of weights in 80.
        "num_blocks": 28_000,
    },
    "jax": {
        "n": 96,
        "scale": 4,
        "cost": "smollm2-cpu",
        "max_num_seqs": 8,
        "max_model_len": 1024,
        "num_blocks": 512,
    },
}


def _value(name: str) -> Any:
    flag = flags.FLAGS[name]
    if flag.present:
        return flag.value
    return _DEFAULTS[EXECUTOR.value].get(name, flag.value)


def base_run() -> Run:
    """FCFS on seed 0 with everything arriving at once; a sweep replaces these fields.

    Prompts are cached where the workload's prompts share prefixes, unless a flag says
    otherwise: elsewhere it finds nothing, and simulations are faster without.
    """
    name, n, scale = _WORKLOAD.value, _value("n"), _value("scale")
    trace = trace_path(name, DATA_DIR.value)
    engine = {field: _value(field) for field in _ENGINE}
    if not flags.FLAGS["enable_prefix_caching"].present:
        jobs = make_workload(name, n=n, seed=0, rate=1.0, data_dir=DATA_DIR.value)
        shares = scale == 1 and any(job.chain for job in jobs)
        engine["enable_prefix_caching"] = shares
    return Run(
        executor=EXECUTOR.value,
        policy="fcfs",
        policy_source=sweep_runs.policy_source("fcfs"),
        workload=name,
        trace=trace.name if trace else None,
        n=n,
        seed=0,
        scale=scale,
        load=None,
        rate_rps=None,
        engine=EngineConfig(**engine),
        cost=get_profile(_value("cost")),
    )


_ENGINE = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "num_blocks",
    "enable_prefix_caching",
    "num_scheduler_steps",
    "launches_in_flight",
    "prefill",
    "batching",
    "max_chunk_tokens",
)


def results_path() -> Path:
    """The file of results."""
    return Path(OUT_DIR.value) / "runs.jsonl"
