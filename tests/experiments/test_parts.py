"""The parts of the experiment scripts that can be wrong in silence."""

from __future__ import annotations

import hashlib
import json
import pathlib

import pytest

from experiments import bench_workloads, common, timeline
from jaxserve.core import Event

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_the_workloads_are_what_their_names_say() -> None:
    p1, p2, p3, p4 = (bench_workloads.make(f"P{i}") for i in (1, 2, 3, 4))
    assert [len(p) for p in p1.prompts] == [128] and p1.output_tokens == [128]
    assert [len(p) for p in p2.prompts] == [128] * 32
    assert len({tuple(p) for p in p2.prompts}) == 32
    assert len(p3.prompts) == 64 and {len(p) for p in p3.prompts} <= {*range(16, 513)}
    assert all(16 <= n <= 256 for n in p3.output_tokens)
    assert {tuple(p[:512]) for p in p4.prompts} == {tuple(p4.prompts[0][:512])}
    assert len({tuple(p) for p in p4.prompts}) == 64
    assert {len(p) for p in p4.prompts} == {544}
    with pytest.raises(ValueError, match="P9.*known are P1"):
        bench_workloads.make("P9")


# What the peers' scripts print of the workloads that they serve.
PEERS = {
    "P1": "eb2413d3c886fa4b",
    "P2": "3ad23396dc66a540",
    "P3": "d5384b23355ac613",
    "P4": "ef3214dc99918cb0",
}


@pytest.mark.parametrize("name", PEERS)
def test_the_peers_serve_the_same_prompts(name: str) -> None:
    text = json.dumps(list(bench_workloads.make(name)))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == PEERS[name]


def test_a_table_aligns_its_columns() -> None:
    rows = [{"name": "a", "x": 1.23456, "n": 7}, {"name": "bb", "x": None, "n": 10}]
    assert common.table(rows).splitlines() == [
        "name     x   n",
        "   a  1.23   7",
        "  bb     -  10",
    ]


def test_json_lines_are_one_object_a_line(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "new" / "events.jsonl"
    rows = [{"text": "größte 长城\n"}, {"x": 1}]
    common.write_json_lines(path, rows)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == rows


def test_the_timeline_is_a_picture(tmp_path: pathlib.Path) -> None:
    def launch(start: float, end: float, slots: list, free: int, idle: int) -> Event:
        data = {
            "token_bucket": 8,
            "submitted_s": start,
            "slots": slots,
            "num_free": free,
            "idle_handles": idle,
        }
        return Event("launch", end, None, data)

    events = [
        launch(0.0, 0.5, [[0, 9, 1]], 5, 0),
        Event("preempted", 0.6, "a", {"slot": 0}),
        launch(0.6, 1.0, [[0, 0, 1], [1, 3, 0]], 2, 3),
    ]
    path = tmp_path / "pictures" / "timeline.png"
    timeline.draw(events, num_blocks=8, slots=2, path=path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_bars_show_pauses_and_nothing_else() -> None:
    def launch(start: float, end: float, slots: list) -> Event:
        return Event("launch", end, None, {"submitted_s": start, "slots": slots})

    launches = [
        launch(0.0, 1.0, [[0, 5, 0], [1, 0, 1]]),
        launch(1.001, 2.0, [[0, 5, 1], [1, 0, 1]]),  # no pause worth a pixel
        launch(2.001, 3.0, [[0, 0, 1]]),  # slot 0 decodes now, slot 1 is idle
        launch(3.001, 4.0, [[0, 0, 1], [1, 0, 1]]),
    ]
    found = timeline.bars(launches, least_gap_s=0.01)
    assert sorted((b.slot, b.start_s, b.end_s) for b in found) == [
        (0, 0.0, 2.0),
        (0, 2.001, 4.0),
        (1, 0.0, 2.0),
        (1, 3.001, 4.0),
    ]


def test_the_demo_prompts_are_what_the_readme_promises() -> None:
    text = (ROOT / "experiments" / "demo_prompts.jsonl").read_text(encoding="utf-8")
    prompts = [json.loads(line) for line in text.splitlines()]
    assert len(prompts) >= 24
    systems = [p["system"] for p in prompts if "system" in p]
    assert len(systems) > 3 and len(set(systems)) == 1
    assert any("\u4e00" <= c <= "\u9fff" for p in prompts for c in p["user"])
    assert any(c in "éèêñüßö" for p in prompts for c in p["user"])
    assert min(p["max_tokens"] for p in prompts) < 40
    assert max(p["max_tokens"] for p in prompts) > 200
