"""The in-package oracle agrees with the independent one."""

from __future__ import annotations

from tests.kernels.suite import AttentionSuite


class TestReference(AttentionSuite):
    implementation = "reference"
