"""A tiny decoder learns to count, from nothing but a reward (GRPO).

A prompt is a task and a digit; the answer counts on from there to 9, and stops. The
reward is the share of the answer that is right before the first mistake. Each update
samples several answers to each prompt, and makes those likelier that did better than
their group (Shao et al. 2024). Engine and learner share the weights: an update replaces
a reference, copies nothing and compiles nothing.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from absl import app, flags, logging
from tqdm import tqdm

from experiments import common
from experiments.pictures import save
from jaxserve import EngineConfig, Rollouts, SamplingParams
from jaxserve.device.step import num_compiled
from jaxserve.models.decoder import Decoder
from jaxserve.models.decoder_config import AttentionKind, DecoderConfig
from jaxserve.models.random_params import random_params
from jaxserve.models.rope import read_rope
from jaxserve.rollout import Rollout, token_logprobs

_UPDATES = flags.DEFINE_integer("updates", 120, "Of the weights.")
_RUNS = flags.DEFINE_integer("runs", 2, "With seeds from --seed on.")
_PROMPTS = flags.DEFINE_integer("prompts", 32, "A rollout.")
_N = flags.DEFINE_integer("n", 8, "Answers a prompt.")
_RATE = flags.DEFINE_float("learning_rate", 3e-3, "Of Adam.")
_CLIP = flags.DEFINE_float("clip", 0.2, "Most that a probability may gain by.")
_ENTROPY = flags.DEFINE_float("entropy", 0.1, "What an unlikely answer is worth.")
_OUT_DIR = flags.DEFINE_string(
    "out_dir", "results", "Folder for JSON lines and the picture."
)

STOP, COUNT, VOCAB = 10, 11, 16  # digits are themselves
LONGEST = 10  # tokens of an answer: 1 to 9, and a stop
MODEL = Decoder(
    DecoderConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        norm_epsilon=1e-5,
        attention=(AttentionKind(read_rope(32, {"rope_theta": 10000.0})),),
        tied=False,
        context_length=64,
        eos_ids=(STOP,),
        dtype="float32",
    )
)


def rewards(prompts: np.ndarray, rollout: Rollout) -> np.ndarray:
    """f32[B]: the share of each answer that is right."""
    firsts = prompts[:, 1:].repeat(len(rollout.tokens) // len(prompts), axis=0)
    wanted = firsts + np.arange(1, LONGEST + 1)  # behind 9 comes STOP
    right = (wanted == np.asarray(rollout.tokens)) & np.asarray(rollout.mask)
    before_a_mistake = np.cumprod(right, axis=1).sum(axis=1)
    return (before_a_mistake / (STOP - firsts[:, 0])).astype(np.float32)


def loss(params: Any, rollout: Rollout, advantages: jax.Array) -> jax.Array:
    """The clipped objective of PPO (Schulman et al. 2017), mean over tokens.

    Unlikely tokens gain a little (the gradient of the entropy, sampled), or an answer
    that is always wrong would be given for ever.
    """
    ratio = jnp.exp(token_logprobs(MODEL, params, rollout) - rollout.logprobs)
    clipped = jnp.clip(ratio, 1 - _CLIP.value, 1 + _CLIP.value)
    worth = advantages[:, None] - _ENTROPY.value * rollout.logprobs
    gains = jnp.minimum(ratio * worth, clipped * worth)
    return -jnp.mean(gains, where=rollout.mask)


def learned(seed: int) -> list[dict[str, Any]]:
    """Learn; a row for each update."""
    optimizer = optax.adam(_RATE.value)

    @jax.jit
    def learn(params, state, rollout, advantages):
        gradient = jax.grad(loss)(params, rollout, advantages)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    params = random_params(MODEL.config, jax.random.key(seed))
    state = optimizer.init(params)
    config = EngineConfig(
        max_model_len=32,
        max_num_seqs=32,  # few launch shapes, which take most of the time to compile
        max_num_batched_tokens=128,
        num_scheduler_steps=5,
        max_logprobs=0,
        seed=seed,
    )
    rollouts = Rollouts(MODEL, params, config, warmup=True)
    compiles = rollouts.engine.stats()["compiles"]
    sampling = SamplingParams(n=_N.value, max_tokens=LONGEST)
    rng = np.random.default_rng(seed)
    rows = []
    for update in tqdm(range(_UPDATES.value), disable=None, desc=f"Seed {seed}"):
        prompts = rng.integers(0, 10, (_PROMPTS.value, 2), np.int32)
        prompts[:, 0] = COUNT
        times_s = [time.perf_counter()]
        version = rollouts.update(params)
        times_s.append(time.perf_counter())
        rollout = rollouts(params, prompts, sampling)
        times_s.append(time.perf_counter())
        assert rollout.weight_version == version == update
        scores = rewards(prompts, rollout)
        groups = scores.reshape(-1, _N.value)
        gains = groups - groups.mean(axis=1, keepdims=True)
        gains /= groups.std(axis=1, keepdims=True) + np.float32(1e-4)
        params, state = jax.block_until_ready(
            learn(params, state, rollout, gains.reshape(-1))
        )
        times_s.append(time.perf_counter())
        update_s, rollout_s, learn_s = np.diff(times_s).tolist()
        rows.append(
            {
                "seed": seed,
                "update": update,
                "reward": float(scores.mean()),
                "tokens": int(rollout.mask.sum()),
                "weights_s": update_s,
                "rollout_s": rollout_s,
                "learn_s": learn_s,
            }
        )
    assert rollouts.engine.stats()["compiles"] == compiles, "an update compiled"
    assert num_compiled(learn) == 1, "the learner compiled twice"
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of one run. Times are medians, for the first update compiles the learner."""
    median = {
        f"{name} ms": 1000 * float(np.median([row[f"{name}_s"] for row in rows]))
        for name in ("weights", "rollout", "learn")
    }
    tokens = np.median([row["tokens"] / row["rollout_s"] for row in rows])
    high = (row["update"] for row in rows if row["reward"] > 0.9)
    return {
        "seed": rows[0]["seed"],
        "first reward": rows[0]["reward"],
        "last 10": float(np.mean([row["reward"] for row in rows[-10:]])),
        "over 0.9 at": next(high, None),
        **median,
        "tokens/s": float(tokens),
        "run s": sum(row[f"{n}_s"] for row in rows for n in ("rollout", "learn")),
    }


def draw(runs: list[list[dict[str, Any]]], path: Path) -> None:
    """Reward over updates, a line for each seed."""
    figure, axis = plt.subplots(figsize=(6.5, 3.8), layout="constrained")
    for rows in runs:
        label = f"seed {rows[0]['seed']}"
        axis.plot([row["reward"] for row in rows], label=label, linewidth=1.2)
    axis.axhline(0.9, color="0.6", linestyle="--", linewidth=1)
    axis.set(xlabel="update", ylabel="mean reward", ylim=(0, 1.02))
    axis.grid(alpha=0.3)
    axis.legend()
    save(figure, path)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    logging.set_verbosity(logging.WARNING)  # JAX tells which backends it tried
    runs = [learned(common.seed() + i) for i in range(_RUNS.value)]
    out = Path(_OUT_DIR.value)
    common.write_json_lines(
        out / "rl_toy.jsonl", [row for rows in runs for row in rows]
    )
    print(common.table([common.rounded(summary(rows)) for rows in runs]))
    draw(runs, out / "rl_toy.png")
    print(out / "rl_toy.png")


if __name__ == "__main__":
    app.run(main)
