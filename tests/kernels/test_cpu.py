"""The `cpu` implementation: the shared suite."""

from __future__ import annotations

from tests.kernels.marks import needs_cpu_kernels
from tests.kernels.suite import AttentionSuite


@needs_cpu_kernels
class TestCpu(AttentionSuite):
    implementation = "cpu"
    caps_logits = False
