"""What prefix caching saves: a shared system prompt, conversations, agents, edits.

With it a turn computes its new tokens, without it the whole history: O(n_new) against
O(n_total) a turn. An edit at depth x recomputes the blocks from x's on, and no other.
What is computed, what is found and what that costs at an API's prices is told for each
scenario, on SmolLM2 or --simulate'd.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from absl import app, flags, logging

from experiments import common, conversations
from experiments.conversations import Answer
from experiments.pictures import COLORS, MARKERS, save
from jaxserve import EngineConfig
from jaxserve.executors.cost_model import get_profile

_SIMULATE = flags.DEFINE_bool("simulate", False, "Answer by a simulation.")
_PROFILE = flags.DEFINE_string("profile", "a100-8b", "Cost of a simulated step.")
_PRICE = flags.DEFINE_float("price", 3.0, "Of a million prompt tokens computed.")
_CACHED = flags.DEFINE_float("cached_price", 0.3, "Of a million found in the cache.")
_OUTPUT = flags.DEFINE_float("output_price", 15.0, "Of a million output tokens.")
_OUT_DIR = flags.DEFINE_string(
    "out_dir", "results", "Folder for JSON lines and the picture."
)


def answers(caching: bool, block_size: int) -> Sequence[Answer]:
    """Every scenario, with caching or without."""
    if not _SIMULATE.value:
        ask, vocab_size = conversations.model(caching)
    else:
        config = EngineConfig(
            max_model_len=1024,
            block_size=block_size,
            num_blocks=2048,
            enable_prefix_caching=caching,
        )
        ask, vocab_size = conversations.simulated(config, get_profile(_PROFILE.value))
    if caching:
        return conversations.run_all(ask, vocab_size, block_size)
    new = conversations.words(vocab_size)  # the same prompts; edits say nothing more
    return [
        *conversations.shared_system_prompt(ask, new),
        *conversations.conversation(ask, new),
        *conversations.agent(ask, new),
    ]


def price(answer: Answer) -> float:
    """What an API would ask for it, in a millionth of the prices' unit."""
    computed = answer.prompt - answer.cached
    prompt = computed * _PRICE.value + answer.cached * _CACHED.value
    return prompt + answer.output * _OUTPUT.value


def rows(cold: Sequence[Answer], warm: Sequence[Answer]) -> list[dict[str, Any]]:
    """A row a scenario; what was cold has no caching."""
    found = []
    for name in dict.fromkeys(answer.scenario for answer in warm):
        mine = [answer for answer in warm if answer.scenario == name]
        plain = [answer for answer in cold if answer.scenario == name]
        prompt = sum(answer.prompt for answer in mine)
        cached = sum(answer.cached for answer in mine)
        last_s, plain_s = mine[-1].ttft_s, plain[-1].ttft_s if plain else None
        full = sum(price(answer._replace(cached=0)) for answer in mine)
        found.append(
            {
                "scenario": name,
                "turns": len(mine),
                "prompt_tokens": prompt,
                "computed": prompt - cached,
                "hit_rate": cached / prompt,
                "last_ttft_s": last_s,
                "uncached_s": plain_s,
                "speedup": plain_s / last_s if plain_s else None,
                "cost_share": sum(map(price, mine)) / full,
            }
        )
    return found


def draw(cold: Sequence[Answer], warm: Sequence[Answer], path: Path) -> None:
    """Time to first token of each turn of the growing scenarios."""
    names = ("conversation", "agent loop")
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    for axis, name in zip(axes, names, strict=True):
        for i, (label, told) in enumerate((("no caching", cold), ("caching", warm))):
            mine = [answer for answer in told if answer.scenario == name]
            tokens = [answer.prompt for answer in mine]
            style = {"color": COLORS[i], "marker": MARKERS[i]}
            axis.plot(tokens, [1e3 * a.ttft_s for a in mine], **style, label=label)
        axis.set(title=name, xlabel="prompt tokens of the turn", ylabel="TTFT (ms)")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend()
    save(figure, path)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    logging.set_verbosity(logging.WARNING)  # JAX tells which backends it tried
    block_size = common.BLOCK_SIZE.value
    cold, warm = answers(False, block_size), answers(True, block_size)
    out, name = Path(_OUT_DIR.value), "prefix_reuse"
    name += "_simulated" if _SIMULATE.value else ""
    lines = [
        {"caching": caching, **answer._asdict()}
        for caching, told in ((False, cold), (True, warm))
        for answer in told
    ]
    common.write_json_lines(out / f"{name}.jsonl", lines)
    print(common.table([common.rounded(row) for row in rows(cold, warm)]))
    print(
        f"cost_share: at {_CACHED.value:g} a million cached, {_PRICE.value:g} computed"
    )
    draw(cold, warm, out / f"{name}.png")
    print(out / f"{name}.png")


if __name__ == "__main__":
    app.run(main)
