"""Every family of the decoder against transformers, every position, however scheduled.

The references are tests/fixtures/families (tools/tiny_families.py). The engine has a
test of its own: tests/engine/test_families.py.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

from jaxserve.models import load
from pallas_kernels import cpu
from tests.models import tiny_families
from tests.models.paged import PagedRun
from tests.models.tiny_families import VARIANTS, max_model_len, reference

TOLERANCE = 1e-4
XLA = ("gemma3_soft_caps", "mistral")  # each compiles for seconds
CASES = [
    pytest.param(
        variant,
        arithmetic,
        marks=[pytest.mark.slow] if arithmetic == "xla" and variant not in XLA else [],
    )
    for variant in VARIANTS
    for arithmetic in ("kernels", "xla")
]


@functools.cache
def _loaded(variant: str, directory: str, kernels_off: str | None):
    del kernels_off
    return load(directory, "float32", max_model_len(variant))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Directories by variant."""
    folder = tmp_path_factory.mktemp("families")
    return {name: tiny_families.write(folder / name, name) for name in VARIANTS}


def check(run: PagedRun, variant: str, steps: list[list[int]]) -> None:
    """Feed prompts and continuations, so many tokens of each in each step."""
    expected = reference(variant)
    for step in steps:
        new, wanted = {}, {}
        for index, count in enumerate(step):
            row, name = expected[index], f"p{index}"
            ids = [*row.prompt, *row.tokens[:-1]]
            at = run.lengths.get(name, 0)
            if ids[at : at + count]:
                new[name] = ids[at : at + count]
                wanted[name] = row.logits[at : at + count]
        for name, logits in run.step(new).items() if new else ():
            np.testing.assert_allclose(logits, wanted[name], atol=TOLERANCE, rtol=0)
    lengths = {f"p{i}": len(row.logits) for i, row in enumerate(expected)}
    assert run.lengths == lengths


@pytest.mark.parametrize(("variant", "arithmetic"), CASES)
def test_every_logit_of_any_schedule(variant, arithmetic, checkpoints, monkeypatch):
    """In one pass; then in odd chunks, beside each other's decode rows."""
    if arithmetic == "xla":
        monkeypatch.setattr(cpu, "unavailable", lambda: "this test is of XLA")
    decoder, params, _ = _loaded(variant, str(checkpoints[variant]), cpu.unavailable())
    rows = len(reference(variant))
    sizes = {"columns": 16, "tokens": 96, "num_blocks": 40}
    check(PagedRun(decoder, params, **sizes), variant, [[64] * rows])
    steps = [
        [size if index != turn % rows else 1 for index in range(rows)]
        for turn, size in enumerate([5, 1, 3, 7, 1, 11, 2, 13, 1, 1, 17, 9, 1, 31])
    ]
    steps += [[64] * rows]
    check(PagedRun(decoder, params, **sizes, seed=1), variant, steps)
