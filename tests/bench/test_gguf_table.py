"""The table of `bench_gguf.py`: what it counts, and where it goes."""

from __future__ import annotations

import bench_experts as experts
import bench_gguf as table_of

RESULT = {"prefill": 0.0123, "token": 0.002, "rate": 100.4, "bytes": 3.2e6, "tokens": [[1, 2, 3, 4], [5, 6, 7, 8]]}


def test_a_line_has_both_engines_and_where_they_part() -> None:
    theirs = RESULT | {"rate": 50.0, "tokens": [[1, 2, 3, 4], [5, 0, 7, 8]]}
    ours = RESULT | {"gaps": [0.014, 0.25]}
    [line] = table_of.table([("tiny", "Q8_0", ours, theirs)]).splitlines()[2:]
    assert line == "| the embedded model, Q8_0 | 3.2 | 12.3, 12.3 | 2, 2 | 100, 50 | 62% | 0.25 |"
    same = table_of.table([("tiny", "Q8_0", ours | {"gaps": []}, RESULT)])
    assert same.endswith("| 100% | 0.00 |")


def test_the_page_has_the_place_once() -> None:
    text = experts.PAGE.read_text(encoding="utf-8")
    assert [text.count(mark) for mark in table_of.MARKS] == [1, 1]
