"""The catalogue of planted defects: each can still be planted. Whether the tests see them is `mutations/run.py`'s."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "mutations"))

from catalogue import ROOT, Mutant, parse, read_catalogue

TEXT = """
file: a.py
test: tests/a.py
# first
- old
+ new
# second
test: tests/b.py -k "x y"
- two
-     lines
+ one
file: b.py
# third
- x
""".splitlines()


def test_every_defect_can_be_planted() -> None:
    mutants = read_catalogue()
    assert [problem for mutant in mutants if (problem := mutant.problem(ROOT))] == []
    assert len(mutants) >= 200
    names = [(mutant.file, mutant.name) for mutant in mutants]
    assert len(set(names)) == len(names)


def test_the_form_of_the_catalogue() -> None:
    first, second, third = parse(TEXT)
    assert first == Mutant("first", "a.py", "tests/a.py", "old", "new")
    assert second == Mutant("second", "a.py", 'tests/b.py -k "x y"', "two\n    lines", "one")
    assert third == Mutant("third", "b.py", "tests/a.py", "x", "")
    with pytest.raises(ValueError, match="line 1: 'what is this' is no part of a defect"):
        list(parse(["what is this"]))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"file": "none.py"}, "there is no such file"),
        ({"old": "absent"}, "occurs 0 times"),
        ({"old": "x"}, "occurs 2 times"),
        ({"old": ""}, "occurs 0 times"),
        ({"new": "y = 1"}, "changes nothing"),
        ({"new": "y ="}, "is no Python"),
        ({"tests": "tests/none.py"}, "its tests are nowhere"),
        ({"tests": "-k word"}, "its tests are nowhere"),
    ],
)
def test_a_defect_that_cannot_be_planted_is_told(changes: dict[str, str], said: str, tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "a.py").write_text("")
    (tmp_path / "code.py").write_text("x = 0\ny = 1\nx = 2\n")
    fields = {"name": "defect", "file": "code.py", "tests": "tests/a.py -k one", "old": "y = 1", "new": "y = 2"}
    problem = Mutant(**{**fields, **changes}).problem(tmp_path)
    assert said in problem and bool(problem) == bool(said)
