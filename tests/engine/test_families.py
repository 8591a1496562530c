"""Every family through the whole engine, in float32, against transformers.

The references are tests/fixtures/families (tools/tiny_families.py): prompts, greedy
tokens and the logits behind each.
"""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve import LLM, RequestOutput, SamplingParams
from tests.kernels.marks import needs_cpu_kernels
from tests.models import tiny_families
from tests.models.tiny_families import VARIANTS, Reference, max_model_len, reference

MARGIN = 1e-3  # closer than this, either of the two best tokens is right
TOLERANCE = 1e-4
FAST = ("gemma3", "qwen2")  # each compiles for ten seconds
CASES = [
    pytest.param(variant, marks=[] if variant in FAST else [pytest.mark.slow])
    for variant in VARIANTS
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=4)


def check(output: RequestOutput, expected: Reference) -> int:
    """Compare tokens and log-probabilities; how many tokens the reference is sure of.

    Where it is not, the continuations may part.
    """
    got = output.outputs[0]
    logits = expected.logits[len(expected.prompt) - 1 :]
    assert len(got.token_ids) == len(got.logprobs) == len(logits)
    for step, token in enumerate(expected.tokens):
        two = np.sort(logits[step])[-2:]
        exact = logits[step].astype(np.float64)
        logprobs = exact - np.log(np.exp(exact - exact.max()).sum()) - exact.max()
        for each, value in got.logprobs[step].items():
            assert value.logprob == pytest.approx(logprobs[each], abs=TOLERANCE)
        if two[1] - two[0] <= MARGIN:
            return step
        assert got.token_ids[step] == token
    return len(expected.tokens)


def serve(directory, variant: str, dtype: str = "float32", **options) -> LLM:
    """An engine that holds all prompts, and not all of their continuations.

    The options are none of its programs' shapes, so that they are compiled once.
    """
    blocks = sum(-(-len(row.prompt) // 4) for row in reference(variant))
    return LLM(
        directory,
        dtype=dtype,
        max_model_len=max_model_len(variant),
        max_num_seqs=3,
        max_num_batched_tokens=64,
        block_size=4,
        num_blocks=blocks + 1,
        max_logprobs=4,
        **options,
    )


@pytest.mark.parametrize("variant", CASES)
def test_answers_are_those_of_transformers(variant, tmp_path):
    """Alone and in one piece; then together in odd chunks, with too little memory; and
    once more from cached blocks."""
    directory = tiny_families.write(tmp_path, variant)
    rows = reference(variant)
    prompts = [row.prompt for row in rows]
    whole = serve(directory, variant)
    sure = 0
    for row in rows:
        (output,) = whole.generate([row.prompt], GREEDY, use_tqdm=False)
        sure += check(output, row)
    assert sure > 0.8 * 12 * len(rows)
    tight = serve(directory, variant, max_chunk_tokens=7)
    for _ in range(2):
        outputs = tight.generate(prompts, GREEDY, use_tqdm=False)
        for output, row in zip(outputs, rows, strict=True):
            check(output, row)
    assert tight.stats()["preemptions"] > 0
    assert outputs[-1].num_cached_tokens > 0


@pytest.mark.slow
@needs_cpu_kernels
@pytest.mark.parametrize("variant", ["gemma3", "mistral", "qwen2", "qwen3"])
def test_with_kernels_a_schedule_changes_no_bit(variant, tmp_path):
    """In bfloat16, where a rounding that depends on the batch soon shows."""
    directory = tiny_families.write(tmp_path, variant)
    prompts = [row.prompt for row in reference(variant)]
    whole = serve(directory, variant, "bfloat16")
    tight = serve(directory, variant, "bfloat16", max_chunk_tokens=7)
    together = tight.generate(prompts, GREEDY, use_tqdm=False)
    for prompt, output in zip(prompts, together, strict=True):
        (alone,) = whole.generate([prompt], GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids
        assert output.outputs[0].logprobs == alone.outputs[0].logprobs
