"""Serve a Poisson stream of real prompts on a real small model, and show what happened;
then serve a burst under three policies, and compare them.

Writes demo/timeline.png (what each slot did, and the KV blocks in use),
demo/policies.png, and demo/events.jsonl (every event, documented in jaxserve/core.py).
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from absl import app, flags
from tqdm import tqdm

from experiments import common, live_runs, small_table, timeline
from jaxserve import LLM, RequestOutput, SamplingParams, metrics
from jaxserve.core import Event

flags.adopt_module_key_flags(common)  # so that --helpshort lists them
_PROMPTS = flags.DEFINE_string(
    "prompts",
    str(Path(__file__).with_name("demo_prompts.jsonl")),
    "JSON lines with user, max_tokens, and perhaps system.",
)
_RATE = flags.DEFINE_float("rate", 8.0, "Requests a second.", lower_bound=1e-3)
_OUT = flags.DEFINE_string("out", "demo", "Folder for the picture and the events.")
_SHOW = flags.DEFINE_integer("show", 6, "Answers to print.", lower_bound=1)


def submit(llm: LLM, prompts: list[dict]) -> None:
    """Hand over every prompt, each with its arrival in the future."""
    rng = np.random.default_rng(common.seed())
    arrival_s = llm.engine.now()
    for i, prompt in enumerate(prompts):
        arrival_s += rng.exponential(1 / _RATE.value)
        messages = [{"role": "user", "content": prompt["user"]}]
        if "system" in prompt:
            messages.insert(0, {"role": "system", "content": prompt["system"]})
        llm.engine.add_request(
            f"r{i:02d}",
            llm.get_tokenizer().apply_chat_template(messages),
            SamplingParams(temperature=0.0, max_tokens=prompt["max_tokens"]),
            arrival_time=float(arrival_s),
            prompt=prompt["user"],
        )


def serve(llm: LLM, requests: int) -> list[RequestOutput]:
    """Run the engine until every request has ended; outputs in order of submission."""
    done: list[RequestOutput] = []
    with tqdm(total=requests, desc="Requests", disable=None) as bar:
        while llm.engine.has_unfinished_requests():
            for output in llm.engine.step():
                if output.finished:
                    done.append(output)
                    bar.update()
    return sorted(done, key=lambda output: output.request_id)


def row(output: RequestOutput) -> dict:
    """One line of the table."""
    times = output.metrics

    def ms(seconds: float | None) -> int | None:
        return None if seconds is None else round(1000 * seconds)

    return {
        "request": output.request_id,
        "prompt": len(output.prompt_token_ids),
        "cached": output.num_cached_tokens,
        "output": len(output.outputs[0].token_ids),
        "end": output.outputs[0].finish_reason,
        "preempted": times.preemptions,
        "queue ms": ms(times.queue_s),
        "TTFT ms": ms(times.ttft_s),
        "TPOT ms": ms(times.tpot_s),
        "E2E ms": ms(times.e2e_s),
    }


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    events: list[Event] = []
    llm = common.make_llm(on_event=events.append)
    with open(_PROMPTS.value, encoding="utf-8") as file:
        prompts = [json.loads(line) for line in file]
    submit(llm, prompts)
    outputs = serve(llm, len(prompts))
    for output in outputs[:: max(1, len(outputs) // _SHOW.value)]:
        text = " ".join(output.outputs[0].text.split())
        print(f"\n{output.request_id}  {output.prompt}\n     -> {text[:300]}")
    print("\n" + common.table([row(output) for output in outputs]) + "\n")
    totals = metrics.summary(events)
    print("\n".join(f"{k:24} {v}" for k, v in common.rounded(totals).items()))
    out = Path(_OUT.value)
    common.write_json_lines(out / "events.jsonl", [event.json() for event in events])
    shape = llm.engine.shape
    timeline.draw(events, shape.num_blocks, shape.max_slots, out / "timeline.png")
    loaded = live_runs.Loaded(llm.engine.model, llm.engine.params)
    picture = out / "policies.png"
    print("\n" + small_table.small_table(loaded, llm.engine.config, picture))
    print(f"\nwrote {out / 'timeline.png'}, {picture} and {out / 'events.jsonl'}")


if __name__ == "__main__":
    flags.set_default(common.MAX_NUM_SEQS, 8)
    flags.set_default(common.NUM_BLOCKS, 68)
    app.run(main)
