"""The tables of `bench_rivals.py`: what is measured, what a cell says, and where they go."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from time import perf_counter, sleep

import bench_experts as experts
import bench_rivals as rivals
import pytest
from rival_child import measure

README = experts.ROOT / "README.md"


def test_an_engine_must_give_all_tokens_that_were_asked_for() -> None:
    asked = []

    def generate(prompts: list[list[int]], new: int) -> list[list[int]]:
        asked.append((len(prompts), new))
        return [[7] * min(new, 5) for _ in prompts]

    work = {"w1": {"prompts": [[1]], "first": [[2]], "new": 5}, "w2": {"prompts": [[1], [2]], "first": [], "new": 4}}
    found = measure(generate, work)
    assert asked == [(1, 2), (1, 2), (1, 1), (1, 5), (2, 4)]
    assert found.keys() == work.keys() and found["w2"][0] == 0.0 and min(map(max, found.values())) > 0
    work["w2"]["new"] = 6
    with pytest.raises(RuntimeError, match=r"w2: rows have \[5\] tokens, not 6"):
        measure(generate, work)


def test_processes_that_a_contestant_leaves_behind_are_ended() -> None:
    left = "import json, subprocess as s, sys; p = s.Popen(['sleep', '600']); print(json.dumps({'pid': p.pid}))"
    started = perf_counter()
    pid = experts.answer([sys.executable, "-c", left])["pid"]
    status = Path(f"/proc/{pid}/stat")
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
        assert perf_counter() - started < 60
        sleep(0.01)
    with pytest.raises(RuntimeError, match="exit 3: no"):
        experts.answer([sys.executable, "-c", "import sys; sys.stderr.write('no'); sys.exit(3)"])


def test_a_line_has_medians_and_their_range_and_nothing_where_nothing_ran() -> None:
    large, small = rivals.CONTESTANTS[4], rivals.CONTESTANTS[-1]
    assert (large.name, large.workloads) == ("offline-llm, w8a16", "w1")
    rounds = [{"load": 1.0, "w1": (0.1, 0.1 + 127 * token)} for token in (0.03, 0.02, 0.0216)]
    one = [{"load": 0.25, "w4": (0.0, 2.0)}]
    first, second = rivals.section([(large, rounds), (small, one)], 3).split("\n\n")[1:]
    assert first.splitlines()[2] == "| offline-llm, w8a16 | 100 | 21.6 (20-30) |  |  | 1 |"
    assert second.splitlines()[2] == "| llama.cpp, Q8_0 | 8192 | 0.25 |"


def test_every_round_asks_for_other_ids() -> None:
    one, other = (rivals.workloads_of(rivals.CONTESTANTS[0], rep, list(rivals.HEADS)) for rep in (0, 1))
    assert list(one) == ["w1", "w2", "w3"] and [bool(work["first"]) for work in one.values()] == [True, False, False]
    assert all(one[name]["prompts"] != other[name]["prompts"] for name in one)
    assert one["w1"]["prompts"] != one["w1"]["first"]
    assert list(rivals.workloads_of(rivals.CONTESTANTS[0], 0, ["w2", "w4"])) == ["w2"]


def test_the_page_has_the_place_once() -> None:
    text = experts.PAGE.read_text(encoding="utf-8")
    assert [text.count(mark) for mark in rivals.MARKS] == [1, 1]


def test_the_picture_is_of_the_table() -> None:
    page = experts.PAGE.read_text(encoding="utf-8")
    drawn = rivals.picture(page)
    assert drawn == rivals.PICTURE.read_text(encoding="utf-8") and drawn.count("<rect") > 6
    assert rivals.picture(re.sub(r"\| (\d+) \(", r"| 1\1 (", page)) != drawn


def test_the_readme_has_medians_of_the_page() -> None:
    page = experts.PAGE.read_text(encoding="utf-8").partition(rivals.MARKS[0])[2]
    rows = re.findall(
        r"^\| ([^|]+) \| ([\d.]+) \| ([\d.]+) \| (\d+) \|$", README.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(rows) > 4
    for name, *medians in rows:
        found = re.search(rf"^\| {re.escape(name)} \| ([\d.]+)[^|]*\| ([\d.]+)[^|]*\| (\d+) ", page, re.MULTILINE)
        assert found is not None and list(found.groups()) == medians, name
