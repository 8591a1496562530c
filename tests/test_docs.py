"""What the pages show runs, and is what they say."""

from __future__ import annotations

import dataclasses
import pathlib
import re

from jaxserve import SamplingParams
from jaxserve.scheduling.policies import POLICIES, get_policy
from jaxserve.testing import check_policy

DOCS = pathlib.Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "policies.md"


def examples(page: pathlib.Path) -> list[str]:
    """The Python on a page."""
    return re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)


def test_the_example_policy_passes_the_check(tmp_path) -> None:
    (code,) = (block for block in examples(PAGE) if "def shortest_prompt" in block)
    path = tmp_path / "my_policies.py"
    path.write_text(code, "utf-8")
    check_policy(get_policy(f"{path}:shortest_prompt(late_s=0.1)"))


def test_two_policies_go_on_from_one_state(capsys) -> None:
    (code,) = (c for c in examples(DOCS / "ablate.md") if "snapshot" in c)
    exec(code, {})
    same, other = capsys.readouterr().out.splitlines()
    assert sorted(eval(same)) == sorted(eval(other))
    # Even requests have priority 0, and those that had not begun are served first.
    assert eval(other)[-3:] == ["1", "3", "5"]


def test_every_policy_is_on_the_page() -> None:
    page = PAGE.read_text("utf-8")
    assert [name for name in POLICIES if f"| `{name}" not in page] == []


def test_every_field_of_a_request_is_on_the_page() -> None:
    rows = [
        line
        for line in (DOCS / "sampling.md").read_text("utf-8").splitlines()
        if line.startswith("| `")
    ]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == {field.name for field in dataclasses.fields(SamplingParams)}


def test_the_examples_of_a_jax_program_run_in_order(capsys) -> None:
    exec("\n".join(examples(DOCS / "rl.md")), {})
    assert capsys.readouterr().out.splitlines() == ["(8, 8) (8, 8)", "1", "True"]
