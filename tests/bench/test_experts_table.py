"""The table of `bench_experts.py`: what it counts, and where it goes."""

from __future__ import annotations

from pathlib import Path

import bench_experts as experts
import pytest
import torch

RESULT = {"prefill": 0.5, "token": 0.02, "rate": 100.0, "bytes": 3e9, "tokens": [[1, 2, 3, 4], [5, 6, 7, 8]]}


def test_agreement_ends_at_the_first_difference() -> None:
    assert experts.shared([[1, 2, 3, 4], [5, 6]], [[1, 9, 3, 4], [5, 6]]) == 0.5
    assert experts.shared([[1, 2]], [[1, 2]]) == 1.0


def test_a_line_for_each_contestant() -> None:
    other = RESULT | {"tokens": [[1, 2, 3, 4], [5, 0, 7, 8]]}
    lines = experts.table({"ours": RESULT | {"floor": 0.015}, "theirs": other}).splitlines()
    assert lines[2:] == [
        "| ours | 3.0 | 500 | 20.0 | 0.75 | 100 | 100% |",
        "| theirs | 3.0 | 500 | 20.0 |  | 100 | 62% |",
    ]


def test_the_page_has_the_place_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = experts.PAGE.read_text(encoding="utf-8")
    assert all(text.count(mark) == 1 for marks in experts.MARKS.values() for mark in marks)
    first, last = experts.MARKS["gpt_oss"]
    (tmp_path / "speed.md").write_text(text, encoding="utf-8")
    monkeypatch.setattr(experts, "PAGE", tmp_path / "speed.md")
    for _ in range(2):
        experts.replace_in_page("the 1st table\n", experts.MARKS["gpt_oss"])
    replaced = (tmp_path / "speed.md").read_text(encoding="utf-8")
    assert replaced.count("the 1st table") == 1
    before, after = text.split(first)[0], text.split(last)[1]
    assert replaced == f"{before}{first}\nthe 1st table\n{last}{after}"


def test_stacked_experts_are_written_one_by_one() -> None:
    gate_up, down = torch.randn(3, 8, 5), torch.randn(3, 5, 4)
    found = experts.published("model.layers.0.mlp.experts.gate_up_proj", gate_up)
    assert torch.equal(found["model.layers.0.mlp.experts.2.up_proj.weight"], gate_up[2, 4:])
    assert len(found) == 6
    found = experts.published("model.layers.0.mlp.experts.down_proj", down)
    assert torch.equal(found["model.layers.0.mlp.experts.1.down_proj.weight"], down[1])
    assert list(experts.published("model.norm.weight", down[0, 0])) == ["model.norm.weight"]
