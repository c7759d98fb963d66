"""What share of defects that nobody chose do the tests see? They are drawn at random from all sources.

    python tests/mutations/random_defects.py --seed 1 --count 100 --survivors survivors.mutants
    python tests/mutations/random_defects.py --seed 1 -k llm/engine             # one room
    python tests/mutations/random_defects.py --seed 1 -k kernels/cpu --suffix .cpp
    python tests/mutations/random_defects.py --seed 1 --record drawn.txt        # stopped, it goes on where it was

A line is drawn, then one change of it (an operator, a comparison, a number, a condition, a
statement or an argument left out). The same seed draws the same defects from the same sources. Docstrings, messages,
annotations, logging and `__repr__` are left as they are.

The tests of a defect are those that import its module, then those of its room. With `--coverage FILE`, made by
`pytest --cov --cov-context=test`, they are those that run the line, the most particular ones first, at most `--most`,
and with `--durations FILE`, the output of `pytest --durations=0 -vv`, at most `--seconds` of them.
A test that fails must pass without the defect, or the verdict is that nothing was shown.

Takes an hour or more: each survivor costs all of its tests. Not part of CI; `run.py` has the defects that must die.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from catalogue import ROOT, Mutant
from run import KILLED, SURVIVED, Record, Tree, _import_what_is_slow

ROOMS = ("llm", "layers", "quantization", "platforms", "kernels")
LEFT_OUT = ("llm/assets/",)
NOT_SHOWN = "not shown"
FIRST = 8  # tests that run alone before the others: most defects are seen by them
# Functions whose calls say something to a person, and functions whose whole text does.
_SAYING = re.compile(r"^(warn|warning|info|debug|error|exception|print|log\w*|add_argument|\w*Error|show|quote|clip)$")
# Arguments that say something to a person, or the same on every CPU.
_SAYING_ARGUMENTS = "strict stacklevel doc help parameter reason reasons device non_blocking".split()
_SHOWING = re.compile(r"^(__repr__|__str__|extra_repr|describe|reason)$")
_FLIPPED: dict[type[ast.AST], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
_SWAPPED: dict[type[ast.AST], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "//",
    ast.BitAnd: "|",
    ast.BitOr: "&",
    ast.LShift: ">>",
    ast.RShift: "<<",
}
# C++ as clang-format leaves it: binary operators stand between spaces.
_CPP = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
_CPP |= {"+": "-", "-": "+", "*": "+", "/": "*", "&&": "||", "||": "&&", "+=": "-=", "<<": ">>", ">>": "<<"}


@dataclass(frozen=True, order=True)
class Change:
    """`text[start:end]` becomes `new`; in characters of the file."""

    start: int
    end: int
    new: str
    what: str


class _Changes(ast.NodeVisitor):
    """All changes of a Python source."""

    def __init__(self, text: str) -> None:
        self.found: list[Change] = []
        self._text = text
        self._starts = [0]
        self._lines = text.splitlines(keepends=True)
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        self.visit(ast.parse(text))

    def _at(self, line: int, column: int) -> int:
        """ast counts bytes."""
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def _span(self, node: ast.AST) -> tuple[int, int]:
        at = node.lineno, node.col_offset, node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]
        return self._at(at[0], at[1]), self._at(at[2], at[3])

    def _source(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self._text[start:end]

    def _add(self, node: ast.AST, new: str, what: str) -> None:
        self.found.append(Change(*self._span(node), new, what))

    def _add_between(self, left: ast.AST, right: ast.AST, new: str, what: str) -> None:
        """The operator between two operands."""
        start, end = self._span(left)[1], self._span(right)[0]
        between = self._text[start:end]
        if found := re.fullmatch(r"([\s)]*)([-+*/%&|<>=!a-z ]*[-+*/%&|<>=!a-z])([\s(]*)", between):
            self.found.append(Change(start + found.end(1), start + found.end(2), new, f"{found[2]} is {what or new}"))

    # What is left as it is

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if _SHOWING.match(node.name) or any("overload" in ast.dump(item) for item in node.decorator_list):
            return
        for default in (*node.args.defaults, *(item for item in node.args.kw_defaults if item)):
            self.visit(default)
        self._visit_body(node.body)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if any("Protocol" in ast.dump(base) for base in node.bases):
            return
        self._visit_body(node.body)

    def _visit_body(self, body: Sequence[ast.stmt]) -> None:
        for item in body:
            if not (isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant)):  # a docstring, or ...
                self.visit(item)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._add(node, "pass", "raise left out")

    def visit_Assert(self, node: ast.Assert) -> None: ...

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None: ...

    def visit_Import(self, node: ast.Import) -> None: ...

    # What is changed

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in self._source(node.test):
            self._negate(node.test)
            self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self.generic_visit(node)  # negated, it would end at once or never

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._negate(test)
        self.generic_visit(node)

    def _negate(self, test: ast.expr) -> None:
        if not isinstance(test, ast.Compare | ast.UnaryOp):  # those have a change of their own
            self._add(test, f"not ({self._source(test)})", "condition negated")

    def visit_Compare(self, node: ast.Compare) -> None:
        left: ast.expr = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            self._add_between(left, right, _FLIPPED[type(operator)], "")
            left = right
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = (ast.JoinedStr, ast.List, ast.Tuple)
        sides = (node.left, node.right)
        if not any(isinstance(side, texts) or _is_text(side) for side in sides) and type(node.op) in _SWAPPED:
            self._add_between(node.left, node.right, _SWAPPED[type(node.op)], "")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = "or" if isinstance(node.op, ast.And) else "and"
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._add_between(left, right, other, "")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            self._add(node, self._source(node.operand), f"{'not' if isinstance(node.op, ast.Not) else '-'} left out")
        if not isinstance(node.operand, ast.Constant):
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._add(node, str(not value), f"{value} is {not value}")
        elif isinstance(value, int) and value < 1000:
            self._add(node, str(value + 1), f"{value} is {value + 1}")
        elif isinstance(value, float):
            other = value * 2 if value else 1.0
            self._add(node, repr(other), f"{value} is {other}")

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add(node, "pass", "statement left out")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            self._add(node, "pass", "statement left out")
        if not any(isinstance(target, ast.Name) and target.id.startswith("__") for target in node.targets):
            self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and _is_saying(node.value):
            return
        if isinstance(node.value, ast.Call | ast.Await):
            self._add(node, "pass", "statement left out")
        self.generic_visit(node)

    def visit_Continue(self, node: ast.Continue) -> None:
        self._add(node, "pass", "continue left out")

    def visit_Break(self, node: ast.Break) -> None:
        self._add(node, "continue", "break is continue")

    def visit_Call(self, node: ast.Call) -> None:
        if _is_saying(node):
            return
        for keyword in node.keywords:
            if keyword.arg is not None and keyword.arg not in _SAYING_ARGUMENTS:
                self._leave_out(keyword)
        self.generic_visit(node)

    def _leave_out(self, keyword: ast.keyword) -> None:
        start, end = self._span(keyword)
        comma = re.compile(r",\s*").match(self._text, end)
        self.found.append(Change(start, comma.end() if comma else end, "", f"{keyword.arg}= left out"))


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def _is_saying(node: ast.Call) -> bool:
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    return bool(_SAYING.match(name))


def _cpp_changes(text: str) -> Iterator[Change]:
    start = 0
    for line in text.splitlines(keepends=True):
        code = line.partition("//")[0]
        if not re.match(r"\s*(#|template|static_assert|using|//)|.*(TORCH_CHECK|throw )", code):
            for found in re.finditer(r"(?<= )(" + "|".join(map(re.escape, _CPP)) + r")(?= )", code):
                new = _CPP[found[0]]
                yield Change(start + found.start(), start + found.end(), new, f"{found[0]} is {new}")
            for found in re.finditer(r"(?<![\w.\"'])\d{1,3}(?![\w.\"'])", code):
                new = str(int(found[0]) + 1)
                yield Change(start + found.start(), start + found.end(), new, f"{found[0]} is {new}")
        start += len(line)


def changes(path: Path) -> list[Change]:
    text = path.read_text()
    return sorted(set(_Changes(text).found if path.suffix == ".py" else _cpp_changes(text)))


def as_mutant(file: str, text: str, change: Change) -> Mutant | None:
    """Whole lines, as many as make their place the only one; None if the change makes no Python, or none at all."""
    lines = text.splitlines(keepends=True)
    first = text.count("\n", 0, change.start)
    last = text.count("\n", 0, max(change.start, change.end - 1))
    changed = text[: change.start] + change.new + text[change.end :]
    if file.endswith(".py"):
        try:
            same = ast.dump(ast.parse(changed)) == ast.dump(ast.parse(text))
        except SyntaxError:
            return None
        if same:
            return None
    before = last
    while text.count("".join(lines[first : last + 1]).rstrip("\n")) > 1 and last - before < 12:
        first, last = max(0, first - 1), min(len(lines) - 1, last + 1)
    start = sum(map(len, lines[:first]))
    end = start + len("".join(lines[first : last + 1]).rstrip("\n"))
    shift = len(change.new) - (change.end - change.start)
    name = f"line {text.count(chr(10), 0, change.start) + 1}: {' '.join(change.what.split())}"
    return Mutant(name, file, "", text[start:end], changed[start : end + shift])


def draw(seed: int, word: str, suffix: str) -> Iterator[tuple[Mutant, int]]:
    """Defects without end but that of the sources, and the line of each, counted from 1."""
    by_line: dict[tuple[str, int], list[Change]] = {}
    texts = {}
    for path in sorted(item for room in ROOMS for item in (ROOT / room).rglob(f"*{suffix}")):
        file = str(path.relative_to(ROOT))
        if word not in file or file.startswith(LEFT_OUT) or path.resolve() != path:  # links lie in llm/
            continue
        texts[file] = path.read_text()
        for change in changes(path):
            by_line.setdefault((file, texts[file].count("\n", 0, change.start) + 1), []).append(change)
    order = random.Random(seed)
    places = sorted(by_line)
    order.shuffle(places)
    for file, line in places:
        mutant = as_mutant(file, texts[file], order.choice(by_line[file, line]))
        if mutant is not None:
            yield mutant, line


def tests_of(file: str) -> str:
    """The test files that import the module, then those of its room."""
    name = module_name(file)
    parent, _, last = name.rpartition(".")
    forms = (f"import {name}", f"from {name} import", f"from {parent} import .*\\b{last}")
    imports = re.compile(rf"^\s*({'|'.join(forms)})\b", re.MULTILINE)
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    importing = [path for path in files if imports.search(path.read_text())]
    room = ROOT / "tests" / f"{name}.".split(".")[1]
    room = room if name != "llm" and room.is_dir() else ROOT / "tests" / "api"
    chosen = dict.fromkeys([*importing, *sorted(room.glob("test_*.py"))])
    return shlex.join(str(path.relative_to(ROOT)) for path in chosen)


def module_name(file: str) -> str:
    name = file.rpartition(".")[0].replace("/", ".").removesuffix(".__init__")
    return name if name.startswith("llm") else f"llm.{name}"


class Coverage:
    """Which tests run a line, of coverage.py's databases, and for how long, of pytest's durations."""

    def __init__(self, paths: Sequence[Path], durations: Sequence[Path], most: int, seconds: float) -> None:
        import coverage

        self._most, self._seconds = most, seconds
        self._tests: dict[str, dict[int, set[str]]] = {}
        self._sizes: Counter[str] = Counter()
        self._durations: dict[str, float] = {}
        for path in durations:
            for duration, name in re.findall(r"^([\d.]+)s \w+ +(tests/[^\s\[]+)", path.read_text(), re.MULTILINE):
                self._durations[name] = self._durations.get(name, 0.0) + float(duration)
        for path in paths:
            data = coverage.CoverageData(str(path))
            data.read()
            for file in data.measured_files():
                lines = self._tests.setdefault(self._relative(file), {})
                for line, contexts in data.contexts_by_lineno(file).items():
                    tests = {context.partition("|")[0].partition("[")[0] for context in contexts if context}
                    lines.setdefault(line, set()).update(tests)
                    self._sizes.update(tests)

    def _relative(self, file: str) -> str:
        """The tree that was measured may lie elsewhere."""
        parts = Path(file).parts
        last = max(index for index, part in enumerate(parts) if part in ROOMS and (ROOT / part).is_dir())
        rooms = [index for index, part in enumerate(parts) if part == "llm"]
        return "/".join(parts[min([*rooms, last]) :])

    def tests(self, file: str, mutant: Mutant, line: int) -> str:
        """ "": no test runs it. A line that is only run on import is that of all tests of its file."""
        lines = self._tests.get(file, {})
        found = {name for number in range(line, line + mutant.old.count("\n") + 1) for name in lines.get(number, ())}
        found = found or set().union(*lines.values())
        chosen: list[str] = []
        left = self._seconds
        for name in sorted(found, key=lambda name: (self._sizes[name], name)):
            duration = self._durations.get(name, 0.0)
            if len(chosen) < self._most and duration <= left:
                chosen.append(name)
                left -= duration
        return shlex.join(chosen)


def judge(tree: Tree, mutant: Mutant, log: Path, clean: Record) -> str:
    names = shlex.split(mutant.tests)
    verdict = SURVIVED
    for part in (names[:FIRST], names[FIRST:]):
        if part and verdict == SURVIVED:
            verdict = tree.judge(replace(mutant, tests=shlex.join(_by_file(part))), log)
    if verdict != KILLED:
        return verdict
    failed = re.findall(r"^(?:FAILED|ERROR) (tests/\S+::[^\s\[]+)", log.read_text(errors="replace"), re.MULTILINE)
    for name in failed[:1]:
        if not clean.has(KILLED, name):
            if tree.test(shlex.quote(name), log.with_suffix(".clean")) != 0:
                return NOT_SHOWN
            clean.add(KILLED, name)
        return f"{KILLED} by {name}"
    return f"{KILLED} (no test ended)"


def _by_file(names: Sequence[str]) -> list[str]:
    """The tests of a file in a row: what they share is made once."""
    files = dict.fromkeys(name.partition("::")[0] for name in names)
    return [name for file in files for name in names if name.partition("::")[0] == file]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Plant defects at random and see whether the tests notice.")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("-k", default="", metavar="WORD", help="only files with this in their path")
    parser.add_argument("--suffix", choices=(".py", ".cpp", ".h"), default=".py")
    parser.add_argument("--coverage", type=Path, nargs="*", default=[], metavar="FILE")
    parser.add_argument("--most", type=int, default=40, help="tests of a defect, where --coverage chooses them")
    parser.add_argument("--durations", type=Path, nargs="*", default=[], metavar="FILE")
    parser.add_argument("--seconds", type=float, default=60.0, help="of tests of a defect, where --durations has them")
    parser.add_argument("--record", type=Path, metavar="FILE", help="verdicts are added; what it has is not run again")
    parser.add_argument("--survivors", type=Path, metavar="FILE", help="where to write those that no test saw")
    parser.add_argument("--draw-only", action="store_true", help="print the defects and their tests")
    options = parser.parse_args(arguments)
    coverage = (
        Coverage(options.coverage, options.durations, options.most, options.seconds) if options.coverage else None
    )
    drawn = []
    for mutant, line in draw(options.seed, options.k, options.suffix):
        mutant.tests = (coverage.tests(mutant.file, mutant, line) if coverage else "") or tests_of(mutant.file)
        drawn += [] if mutant.problem(ROOT) else [mutant]
        if len(drawn) == options.count:
            break
    if options.draw_only:
        print("\n".join(map(written, drawn)))
        return 0
    _import_what_is_slow()
    with tempfile.TemporaryDirectory() as folder:
        return _run(drawn, Tree.copy(Path(folder) / "tree"), Path(folder) / "log", options)


def _run(drawn: list[Mutant], tree: Tree, log: Path, options: argparse.Namespace) -> int:
    before = options.record.read_text().splitlines() if options.record and options.record.exists() else []
    counts: Counter[str] = Counter()
    record, clean = Record(options.record), Record(None)
    for mutant in drawn:
        said = next((line for line in before if line.endswith(f" | {mutant.title}")), None)
        if said is None:
            started = time.monotonic()
            said = f"{judge(tree, mutant, log, clean)} | {mutant.title}"
            print(f"{time.monotonic() - started:5.0f}s  {said}", flush=True)
            record.add(*said.split(" ", 1))
        verdict = next(kind for kind in (KILLED, SURVIVED, NOT_SHOWN, "NOT RUN") if said.startswith(kind))
        counts[verdict] += 1
        if verdict == SURVIVED and options.survivors:
            with options.survivors.open("a") as file:
                file.write(f"{written(mutant)}\n")
    judged = counts[KILLED] + counts[SURVIVED]
    share = f"{counts[KILLED] / judged:.0%}" if judged else "none"
    print(f"{counts[KILLED]} of {judged} died ({share}); of {len(drawn)} drawn {len(drawn) - judged} showed nothing")
    return 0


def written(mutant: Mutant) -> str:
    """As a `.mutants` file has it."""
    old = "\n".join(f"- {line}" for line in mutant.old.split("\n"))
    new = "\n".join(f"+ {line}" for line in mutant.new.split("\n"))
    return f"file: {mutant.file}\ntest: {mutant.tests}\n# {mutant.name}\n{old}\n{new}\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
