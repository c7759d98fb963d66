"""The catalogue of planted defects: each can still be planted. Whether the tests see them is `mutations/run.py`'s."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "mutations"))

import random_defects
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


SOURCE = '''
"""A docstring of 1 + 1."""
LIMIT = 3


def look(value: int | None, *, most: int = 5) -> int:
    """Raises ValueError if value < 0."""
    if value is None or value < 0:
        raise ValueError(f"value must be {most + 1}, got {value}.")
    kept.append(value)
    return look(value - 1, most=LIMIT) if not done else -value


class Kept:
    def __repr__(self) -> str:
        return "a" * 3
'''


def test_defects_at_random_leave_what_is_said_alone(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SOURCE)
    (tmp_path / "a.cpp").write_text("#if A < 3\nfor (int i = 0; i < n; ++i) a[i] += b * c;  // 1 + 2\n")
    changes = random_defects.changes(tmp_path / "a.py")
    changed = {
        (SOURCE[change.start : change.end].partition("\n")[0].partition("(")[0], change.new) for change in changes
    }
    assert changed == {
        *(
            ("3", "4"),
            ("5", "6"),
            ("is", "is not"),
            ("or", "and"),
            ("<", "<="),
            ("0", "1"),
            ("raise ValueError", "pass"),
        ),
        *(
            ("kept.append", "pass"),
            ("-", "+"),
            ("1", "2"),
            ("most=LIMIT", ""),
            ("not done", "done"),
            ("-value", "value"),
        ),
        ("value is None or value < 0", "not (value is None or value < 0)"),
    }
    for change in changes:
        mutant = random_defects.as_mutant("a.py", SOURCE, change)
        assert mutant is not None and SOURCE.count(mutant.old) == 1
        assert mutant.apply(SOURCE) == SOURCE[: change.start] + change.new + SOURCE[change.end :]
    kernel = [(change.start, change.new) for change in random_defects.changes(tmp_path / "a.cpp")]
    assert kernel == [(23, "1"), (28, "<="), (43, "-="), (48, "+")]


def test_defects_at_random_are_those_of_their_seed() -> None:
    def first(seed: int) -> list[Mutant]:
        drawn = random_defects.draw(seed, "llm/jobs", ".py")
        return [next(drawn)[0] for _ in range(5)]

    assert first(1) == first(1) != first(2)
    assert "tests/jobs/test_jobs.py" in random_defects.tests_of("llm/jobs/journal.py").split()
