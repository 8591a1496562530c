"""Cost profiles: what ships, and what is refused."""

from __future__ import annotations

import json
import pathlib

import pytest

from jaxserve.executors import cost_model
from jaxserve.executors.cost_model import PROFILES, get_profile

GOOD = {"fixed_s": 0.01, "token_s": 1e-4, "context_token_s": 1e-7, "floor_s": 0}


def test_the_a100_class_profile_by_hand() -> None:
    """step = max(12.5 ms, 80 us a token) + 0.082 us a context token."""
    cost = get_profile("a100-8b")
    assert cost.step_s(0, 1, 0) == pytest.approx(0.0125)
    assert cost.step_s(448, 64, 100_000) == pytest.approx(0.04096 + 0.0082)
    assert cost.step_s(0, 100, 1000) == pytest.approx(0.0125 + 0.000082)


def test_every_profile_says_where_it_is_from_and_when() -> None:
    for name, profile in json.loads(PROFILES.read_text(encoding="utf-8")).items():
        assert get_profile(name).step_s(512, 0, 0) > 0
        assert len(profile["provenance"]) > 40 and profile["date"] >= "2026"


def test_an_unknown_profile_names_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'h100' must be one of \['a100-8b'"):
        get_profile("h100")


@pytest.mark.parametrize("bad", [None, -1e-9, "0.1", True, float("inf"), float("nan")])
@pytest.mark.parametrize("field", GOOD)
def test_a_cost_that_is_no_time_is_refused(
    field: str, bad: object, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "profiles.json"
    path.write_text(json.dumps({"mine": GOOD | {field: bad}}), encoding="utf-8")
    monkeypatch.setattr(cost_model, "PROFILES", path)
    with pytest.raises(ValueError, match=f"{field}=.*profile 'mine' must be a number"):
        get_profile("mine")


def test_a_profile_without_a_cost_is_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "profiles.json"
    lacks = {k: v for k, v in GOOD.items() if k != "floor_s"}
    path.write_text(json.dumps({"mine": lacks}), encoding="utf-8")
    monkeypatch.setattr(cost_model, "PROFILES", path)
    with pytest.raises(ValueError, match="floor_s=None of profile 'mine'"):
        get_profile("mine")
