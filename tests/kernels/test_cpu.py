"""The `cpu` implementation: the shared suite, and what only it promises."""

from __future__ import annotations

from tests.kernels.suite import AttentionSuite


class TestCpu(AttentionSuite):
    implementation = "cpu"
