"""SmolLM2-135M-Instruct through the whole engine in float32 against transformers.

The reference is tests/fixtures/smollm2_greedy.* (tools/make_fixtures.py): 16 prompts
and 48 greedy tokens each, with the margin between the two best logits at every step.
"""

from __future__ import annotations

import functools
import pathlib

import numpy as np
import pytest

from jaxserve import LLM, RequestOutput, SamplingParams
from jaxserve.models import smollm2_path

FIXTURES = pathlib.Path(__file__).resolve().parents[1] / "fixtures"
MARGIN = 1e-3  # closer than this, either of the two best tokens is right
TOKENS = 48
PARAMS = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)


@functools.cache
def reference() -> tuple[list[list[int]], np.ndarray, np.ndarray]:
    """(prompts, tokens i32[16, 48], margins f32[16, 48]) of transformers."""
    with np.load(FIXTURES / "smollm2_greedy.npz") as saved:
        ends = np.cumsum(saved["prompt_lengths"])[:-1]
        prompts = [ids.tolist() for ids in np.split(saved["prompt_ids"], ends)]
        return prompts, saved["tokens"], saved["margins"]


def make_llm(**options: object) -> LLM:
    return LLM(
        smollm2_path(),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        max_logprobs=4,
        **options,  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make_llm(num_blocks=256)


def check(outputs: list[RequestOutput], indices: range) -> None:
    """Equal tokens up to the first one that the reference itself is unsure of."""
    _, tokens, margins = reference()
    for output, i in zip(outputs, indices, strict=True):
        got = output.outputs[0].token_ids
        assert len(got) == TOKENS and output.outputs[0].finish_reason == "length"
        unsure = np.flatnonzero(margins[i] <= MARGIN)
        sure = int(unsure[0]) if len(unsure) else TOKENS
        assert got[:sure] == tokens[i, :sure].tolist(), f"prompt {i}"


def test_the_reference_is_mostly_sure() -> None:
    _, tokens, margins = reference()
    assert tokens.shape == (16, TOKENS)
    assert (margins > MARGIN).mean() > 0.99


def test_all_together_cold_and_cached(llm: LLM) -> None:
    prompts, _, _ = reference()
    llm.reset_prefix_cache()
    check(llm.generate(prompts, PARAMS, use_tqdm=False), range(16))
    again = llm.generate(prompts, PARAMS, use_tqdm=False)
    check(again, range(16))
    for prompt, output in zip(prompts, again, strict=True):
        assert output.num_cached_tokens == (len(prompt) - 1) // 16 * 16


@pytest.mark.parametrize("index", range(4))
def test_alone(llm: LLM, index: int) -> None:
    prompts, _, _ = reference()
    llm.reset_prefix_cache()
    outputs = llm.generate(prompts[index], PARAMS, use_tqdm=False)
    check(outputs, range(index, index + 1))


def test_eight_steps_a_launch_in_tight_memory_two_in_flight() -> None:
    prompts, _, _ = reference()
    need = sum(-(-(len(prompt) + TOKENS - 1) // 16) for prompt in prompts)
    llm = make_llm(num_blocks=need // 3, num_scheduler_steps=8, launches_in_flight=2)
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    assert llm.stats()["preemptions"] > 0
    check(outputs, range(16))
    check(llm.generate(prompts, PARAMS, use_tqdm=False), range(16))


@pytest.mark.slow
def test_a_third_of_the_memory_one_step_a_launch(llm: LLM) -> None:
    prompts, _, _ = reference()
    need = sum(-(-(len(prompt) + TOKENS - 1) // 16) for prompt in prompts)
    tight = make_llm(num_blocks=need // 3)
    outputs = tight.generate(prompts, PARAMS, use_tqdm=False)
    assert tight.stats()["preemptions"] > 0
    check(outputs, range(16))


SCHEDULES = {
    "static batches": {"batching": "static"},
    "mlfq": {"scheduling_policy": "mlfq(quanta=(8, 16))", "tight": True},
    "mlfq, four steps a launch": {
        "scheduling_policy": "mlfq(quanta=(8, 16))",
        "num_scheduler_steps": 4,
        "enable_prefix_caching": False,
        "tight": True,
    },
    "srpt, prompts apart": {
        "scheduling_policy": "srpt(history(window=4), preempt_until=1.0)",
        "prefill": "prefill_first",
        "tight": True,
    },
    "ageing priorities, decodes first": {
        "scheduling_policy": "priority(aging_s=1.0)",
        "prefill": "decode_first",
        "max_chunk_tokens": 32,
        "tight": True,
    },
    "fair share, two launches in flight": {
        "scheduling_policy": "fair_share",
        "launches_in_flight": 2,
        "tight": True,
    },
    "sjf by the prompt, bounded": {
        "scheduling_policy": "bounded_wait(sjf(prompt_signals), 3)",
        "enable_prefix_caching": False,
        "launches_in_flight": 3,
        "tight": True,
    },
}


MODES = ("recompute", "swap", "disk", "auto")
TIGHT = [name for name in SCHEDULES if SCHEDULES[name].get("tight")]


def check_schedule(name: str, mode: str, folder: pathlib.Path) -> None:
    """Serve all prompts; their answers must be the reference's."""
    prompts, _, _ = reference()
    options = dict(SCHEDULES[name])
    if mode != "recompute":
        options |= {"preemption_mode": mode, "num_swap_blocks": 24}
    if mode in ("disk", "auto"):
        options |= {"disk_cache_dir": str(folder), "num_disk_blocks": 100}
    need = sum(-(-(len(prompt) + TOKENS - 1) // 16) for prompt in prompts)
    tight = options.pop("tight", False)
    llm = make_llm(num_blocks=need // 3 if tight else 256, **options)
    outputs = llm.generate(
        prompts,
        PARAMS,
        use_tqdm=False,
        priority=[i % 3 for i in range(16)],
        user=["ann" if i % 4 else "bob" for i in range(16)],
    )
    stats = llm.stats()
    assert (stats["preemptions"] > 0) == tight
    if mode in ("swap", "disk"):
        assert stats[f"preemptions_by_{mode}"] > 0 and stats["restored_blocks"] > 0
    check(outputs, range(16))
    llm.close()


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("static batches", "recompute"),
        ("mlfq", "swap"),
        ("srpt, prompts apart", "auto"),
        ("ageing priorities, decodes first", "disk"),
        ("fair share, two launches in flight", "recompute"),
        ("fair share, two launches in flight", "swap"),
        ("sjf by the prompt, bounded", "disk"),
    ],
)
def test_every_schedule_gives_the_same_answers(
    name: str, mode: str, tmp_path: pathlib.Path
) -> None:
    check_schedule(name, mode, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TIGHT)
def test_every_schedule_and_every_way_to_preempt(
    name: str, mode: str, tmp_path: pathlib.Path
) -> None:
    check_schedule(name, mode, tmp_path)


def test_the_slow_tests_cover_six_schedules() -> None:
    assert len(TIGHT) == 6
