"""The policy that docs/policies.md shows runs, and is what it says."""

from __future__ import annotations

import pathlib
import re

from jaxserve.scheduling.policies import POLICIES, get_policy
from jaxserve.testing import check_policy

PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "policies.md"


def test_the_example_policy_passes_the_check(tmp_path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    (code,) = (block for block in blocks if "def shortest_prompt" in block)
    path = tmp_path / "my_policies.py"
    path.write_text(code, "utf-8")
    check_policy(get_policy(f"{path}:shortest_prompt(late_s=0.1)"))


def test_every_policy_is_on_the_page() -> None:
    page = PAGE.read_text("utf-8")
    assert [name for name in POLICIES if f"| `{name}" not in page] == []
