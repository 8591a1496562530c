"""CPU kernels in other processes: for other processors, and from the caches on disk."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from pallas_kernels import cpu
from tests.kernels import numpy_oracle, small_batch
from tests.kernels.marks import needs_cpu_kernels

pytestmark = needs_cpu_kernels
ROOT = pathlib.Path(__file__).parents[2]
# To compile attention for both dtypes takes 20 seconds, if it is not in the cache.
WHAT = ["linear", pytest.param("attention", marks=pytest.mark.slow)]


def _run(path: pathlib.Path, what: str, **environment: str) -> dict[str, np.ndarray]:
    """The values of `small_batch` from a process of its own."""
    subprocess.run(
        [sys.executable, "-m", "tests.kernels.small_batch", str(path), what],
        cwd=ROOT,
        env=os.environ | environment,
        check=True,
        timeout=300,
    )
    with np.load(path) as values:
        return dict(values)


@pytest.mark.parametrize("what", WHAT)
def test_a_processor_without_avx512_computes_the_same(what, tmp_path):
    actual = _run(
        tmp_path / "out.npz",
        what,
        NUMBA_CPU_NAME="haswell",
        NUMBA_CPU_FEATURES="+avx2,+fma",
    )
    assert set(actual["sets"]) == {"avx2", "fma"}
    for dtype in small_batch.DTYPES:
        if what == "attention":
            batch = small_batch.attention_batch(dtype)
            expected = numpy_oracle.paged_attention(
                *batch[:-1], scale=small_batch.SCALE
            )
        else:
            x, weight = small_batch.linear_operands(dtype)
            expected = x.astype(np.float64) @ weight.astype(np.float64)
        defined = ~np.isnan(expected)
        exact = dtype == "float32" or what == "linear"  # 8 roundings of sums up to 80
        np.testing.assert_allclose(
            actual[f"{what} {dtype}"][defined],
            expected[defined],
            rtol=0,
            atol=4e-5 if exact else 1e-2,
        )


@pytest.mark.skipif(
    "avx512bf16" not in (cpu.instruction_sets() if not cpu.unavailable() else ()),
    reason="this processor does not multiply bf16 itself",
)
@pytest.mark.parametrize("what", WHAT)
def test_bf16_without_the_instruction_has_the_same_bits(what, tmp_path):
    has = {name for name in cpu.instruction_sets() if not name.startswith("amx")}
    native, without = (
        _run(
            tmp_path / "out.npz",
            what,
            NUMBA_CPU_NAME="icelake-server",
            NUMBA_CPU_FEATURES=",".join(f"+{name}" for name in sets),
        )
        for sets in (has, has - {"avx512bf16"})
    )
    assert set(native.pop("sets")) - set(without.pop("sets")) == {"avx512bf16"}
    for name, value in without.items():
        np.testing.assert_array_equal(value, native[name])


@pytest.mark.skipif(
    "amx-bf16" not in (cpu.instruction_sets() if not cpu.unavailable() else ()),
    reason="this processor has no tiles",
)
@pytest.mark.parametrize("what", WHAT)
def test_emulated_tiles_have_the_bits_of_the_machine_s(what, tmp_path):
    """What the emulation is for on other machines rests on this."""
    emulated = _run(
        tmp_path / "out.npz", what, EMULATED_TILES="1", NUMBA_CACHE_DIR=str(tmp_path)
    )
    native = np.asarray(getattr(small_batch, what)("bfloat16"), np.float32)
    np.testing.assert_array_equal(emulated[f"{what} bfloat16"], native)


@pytest.mark.parametrize("what", WHAT)
def test_what_one_process_compiles_another_takes_from_the_caches(what, tmp_path):
    """So nothing in them is true of one process alone, as an address is."""
    caches = tmp_path / "numba", tmp_path / "jax"
    values, files = [], []
    for i in range(2):
        out = _run(
            tmp_path / f"{i}.npz",
            what,
            NUMBA_CACHE_DIR=str(caches[0]),
            JAX_COMPILATION_CACHE_DIR=str(caches[1]),
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        )
        values.append(out)
        files.append(
            {path for cache in caches for path in cache.rglob("*") if path.is_file()}
        )
    for name, value in values[0].items():
        np.testing.assert_array_equal(values[1][name], value)
    for cache, suffix in zip(caches, (".nbc", "-cache"), strict=True):
        assert any(cache in p.parents and p.name.endswith(suffix) for p in files[0])
    assert files[0] == files[1]
