"""The `xla` implementation: the shared suite, and that it never copies the pool."""

from __future__ import annotations

from tests.kernels.suite import AttentionSuite


class TestXla(AttentionSuite):
    implementation = "xla"
