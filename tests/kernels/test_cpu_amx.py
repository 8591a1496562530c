"""AMX: the instructions that are emitted, and the kernels on an emulation of them.

On a processor that has AMX, every other test of the CPU kernels runs on it.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from pallas_kernels import cpu
from tests.kernels.marks import needs_cpu_kernels

pytestmark = needs_cpu_kernels
ROOT = pathlib.Path(__file__).parents[2]

_ASSEMBLY = """
from numba import cfunc
from pallas_kernels.cpu import amx, compiling, kinds, linear, tile
tile.TILES = amx.Tiles()
def panel(frame, item):
    linear._panel(kinds.PAIRS, frame, item)
print(cfunc(compiling.BODY)(panel)._library.get_asm_str())
"""


def _run(arguments: list[str], cache: pathlib.Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"NUMBA_CACHE_DIR": str(cache)} | environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.skipif(
    cpu.unavailable() is not None
    or not {"avx512f", "avx512bf16"} <= cpu.instruction_sets(),
    reason="numba compiles for no processor that has more than this one",
)
def test_a_processor_with_amx_gets_its_instructions(tmp_path):
    features = [*cpu.instruction_sets(), "amx-tile", "amx-bf16"]
    assembly = _run(
        ["-c", _ASSEMBLY],
        tmp_path,
        NUMBA_CPU_NAME="sapphirerapids",
        NUMBA_CPU_FEATURES=",".join(f"+{name}" for name in features),
    )
    for name in ("ldtilecfg", "tileloadd", "tdpbf16ps", "tilestored", "tilerelease"):
        assert name in assembly


def _passes_on_tiles(files: list[str], cache: pathlib.Path) -> None:
    paths = [f"tests/kernels/{name}.py" for name in files]
    out = _run(["-m", "pytest", "-q", *paths], cache, EMULATED_TILES="1")
    assert " passed" in out


def test_linear_layers_on_emulated_tiles(tmp_path):
    _passes_on_tiles(["test_packed"], tmp_path)


@pytest.mark.slow
def test_attention_on_emulated_tiles(tmp_path):
    _passes_on_tiles(["test_cpu", "test_cpu_bits", "test_packed_bits"], tmp_path)
