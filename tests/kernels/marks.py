"""Marks for tests that some machines cannot run."""

from __future__ import annotations

import pytest

from pallas_kernels import cpu

_REASON = cpu.unavailable()

needs_cpu_kernels = pytest.mark.skipif(
    _REASON is not None, reason=f"the CPU's kernels do not apply: {_REASON}"
)
