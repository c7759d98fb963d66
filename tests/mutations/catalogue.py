"""Planted defects as data: the `*.mutants` files, and whether each still applies.

Their form, line by line:

    file: llm/engine/scheduler.py             where the next defects are planted
    test: tests/engine/test_scheduler.py      what must see them, as arguments of pytest
    # what is wrong with the defect           its name; it begins a defect
    - the text to replace                     exactly one place of the file has it; several lines are joined
    + what stands there instead

`test:` holds until the next one; after a `#` line it is that defect's alone.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]


@dataclass
class Mutant:
    """A defect: `old` in `file` becomes `new`; `tests`: arguments of pytest."""

    name: str
    file: str
    tests: str
    old: str = ""
    new: str = ""

    @property
    def title(self) -> str:
        return f"{self.file}: {self.name}"

    def apply(self, text: str) -> str:
        return text.replace(self.old, self.new)

    def problem(self, root: Path) -> str:
        """Why it cannot be planted, "" if it can."""
        where = self.title
        path = root / self.file
        if not path.is_file():
            return f"{where}: there is no such file"
        text = path.read_text()
        if not self.old or text.count(self.old) != 1:
            return f"{where}: the text to replace occurs {text.count(self.old) if self.old else 0} times, not once"
        if self.old == self.new:
            return f"{where}: changes nothing"
        files = [part for part in shlex.split(self.tests) if part.startswith("tests/")]
        missing = [part for part in files if not (root / part.partition("::")[0]).exists()]
        if missing or not files:
            return f"{where}: its tests are nowhere: {self.tests!r}"
        if path.suffix == ".py":
            try:
                compile(self.apply(text), self.file, "exec")
            except SyntaxError as error:
                return f"{where}: is no Python: {error}"
        return ""


def parse(lines: Sequence[str]) -> Iterator[Mutant]:
    """The defects of one file of the catalogue; raises ValueError for a line of no known form."""
    file = tests = ""
    mutant: Mutant | None = None
    for number, line in enumerate(lines, 1):
        kind, _, rest = line.partition(" ")
        if not line.strip():
            continue
        if kind == "#":
            if mutant is not None:
                yield mutant
            mutant = Mutant(rest, file, tests)
        elif kind == "file:" or (kind == "test:" and (mutant is None or mutant.old)):
            if mutant is not None:
                yield mutant
            mutant = None
            file, tests = (rest, tests) if kind == "file:" else (file, rest)
        elif kind == "test:" and mutant is not None:
            mutant.tests = rest
        elif kind == "-" and mutant is not None:
            mutant.old += ("\n" if mutant.old else "") + rest
        elif kind == "+" and mutant is not None:
            mutant.new += ("\n" if mutant.new else "") + rest
        else:
            raise ValueError(f"line {number}: {line!r} is no part of a defect")
    if mutant is not None:
        yield mutant


def read_catalogue(folder: Path = FOLDER) -> list[Mutant]:
    return [mutant for path in sorted(folder.glob("*.mutants")) for mutant in parse(path.read_text().splitlines())]
