"""SmolLM2-135M-Instruct: with the CPU kernels a schedule changes no bit of an answer.

Tokens and log-probabilities, in bfloat16 too, where a rounding that depends on the
batch would soon choose another token.
"""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.models import smollm2_path
from tests.kernels.marks import needs_cpu_kernels

FIXTURES = pathlib.Path(__file__).resolve().parents[1] / "fixtures"
TOKENS = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=2)
DRAWN = SamplingParams(max_tokens=TOKENS, ignore_eos=True, logprobs=2, seed=7)

Answer = tuple[list[int], list[dict[int, float]]]

pytestmark = needs_cpu_kernels


@functools.cache
def prompts() -> list[list[int]]:
    with np.load(FIXTURES / "smollm2_greedy.npz") as saved:
        ends = np.cumsum(saved["prompt_lengths"])[:-1]
        return [ids.tolist() for ids in np.split(saved["prompt_ids"], ends)]


def serve(dtype: str, *, alone: int = 0, **options: Any) -> list[Answer]:
    """Every prompt's answer, tokens drawn for every other one.

    Args:
      alone: serve just so many prompts, one after another.
    """
    defaults = {"max_num_seqs": 16, "max_num_batched_tokens": 128, "num_blocks": 256}
    llm = LLM(
        smollm2_path(),
        dtype=dtype,
        max_model_len=512,
        max_logprobs=4,
        **(defaults | options),  # type: ignore[arg-type]
    )
    params = [(GREEDY, DRAWN)[i % 2] for i in range(len(prompts()))]
    if alone:
        outputs = [
            llm.generate([prompt], each, use_tqdm=False)[0]
            for prompt, each in zip(prompts()[:alone], params, strict=False)
        ]
    else:
        outputs = llm.generate(prompts(), params, use_tqdm=False)
    answers = []
    for output in outputs:
        completion = output.outputs[0]
        assert completion.logprobs is not None
        logs = [{t: e.logprob for t, e in at.items()} for at in completion.logprobs]
        answers.append((completion.token_ids, logs))
    return answers


@functools.cache
def together(dtype: str) -> list[Answer]:
    return serve(dtype)


SCHEDULES: dict[str, dict[str, Any]] = {
    "one after another": {"alone": 6},
    "few slots, odd chunks": {"max_num_batched_tokens": 37, "max_num_seqs": 5},
    "tight memory, MLFQ, four steps a launch": {
        "num_blocks": 48,
        "scheduling_policy": "mlfq",
        "num_scheduler_steps": 4,
    },
    "large blocks, two launches in flight": {
        "block_size": 64,
        "num_blocks": 64,
        "max_num_batched_tokens": 512,
        "launches_in_flight": 2,
        "enable_prefix_caching": False,
    },
}


SLOW = ("few slots, odd chunks", "large blocks, two launches in flight")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in SCHEDULES
    ],
)
@pytest.mark.parametrize(
    "dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)]
)
def test_no_bit_of_an_answer_depends_on_the_schedule(dtype: str, name: str) -> None:
    expected = together(dtype)[: SCHEDULES[name].get("alone")]
    assert serve(dtype, **SCHEDULES[name]) == expected
