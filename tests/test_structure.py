"""More rules of the package's source: how often `Any` stands, no lost files, no unread names, no import cycles.

Every rule has a negative control. Which way imports point is in `test_architecture.py`.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_architecture import SOURCES, Source, covered, imported_names, source

# How often `Any` may stand in the package.
MAX_ANY = 317
FILES = {Path(item.path).name for item in SOURCES}


def functions(item: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(item.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def untyped_self(item: Source) -> list[str]:
    """`self: Any` gives up every check of a method's body."""
    return [
        item.at(node, f"{node.name}: self: Any; leave it without an annotation, or name a Protocol")
        for node in functions(item)
        for argument in [*node.args.posonlyargs, *node.args.args][:1]
        if argument.arg == "self" and argument.annotation is not None and "Any" in ast.unparse(argument.annotation)
    ]


def lost_files(item: Source) -> list[str]:
    """A reader who is sent to a file should find it."""
    return [
        f"llm/{item.path}:{number}: {name} is no file of the package; name the one that has its code now"
        for number, line in enumerate(item.text.splitlines(), start=1)
        for name in re.findall(r"(?:`|\bsee )(\w+\.py)\b", line)
        if name not in FILES
    ]


def unread_names(item: Source) -> list[str]:
    """Of the private names of a module, which nobody else reads."""
    words = Counter(re.findall(r"\w+", item.text))
    return [
        item.at(node, f"{name} is read by nobody")
        for node in item.tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.FunctionDef | ast.ClassDef)
        for name in bound_names(node)
        if name.startswith("_") and not name.startswith("__") and words[name] == 1
    ]


def bound_names(node: ast.Assign | ast.AnnAssign | ast.FunctionDef | ast.ClassDef) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]


def count_any(item: Source) -> int:
    """How often the name `Any` stands in the code, its import not counted."""
    return sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(item.tree))


def running(node: ast.AST) -> Iterator[ast.AST]:
    """Everything below `node` that runs: not what stands under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            for other in child.orelse:
                yield other
                yield from running(other)
        else:
            yield child
            yield from running(child)


def imports_of(item: Source, modules: frozenset[str]) -> set[str]:
    """The modules of the package that `item` imports, at once or later inside of a function."""
    nodes = set(running(item.tree))
    found = set()
    for node, name in imported_names(item):
        module = name
        while module and module not in modules:
            module = module.rpartition(".")[0]
        if node in nodes and covered(module, "llm") and module != item.module:
            found.add(module)
    return found


def reachable(module: str, graph: dict[str, set[str]]) -> set[str]:
    """Every module that importing `module` may import; itself only when it is in a circle."""
    found: set[str] = set()
    waiting = list(graph[module])
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += graph[name]
    return found


def import_cycles(sources: list[Source]) -> list[str]:
    """Each set of modules that import each other in a circle. An import inside of a function counts: it hides one.

    Not the imports of `llm` itself, which looks its public names up when they are asked for.
    """
    modules = frozenset(item.module for item in sources)
    graph = {item.module: imports_of(item, modules) if item.module != "llm" else set() for item in sources}
    reached = {module: reachable(module, graph) for module in graph}
    circles = {frozenset(other for other in reached[module] if module in reached[other]) for module in graph}
    return sorted(" <-> ".join(sorted(circle)) for circle in circles if circle)


RULES = [untyped_self, lost_files, unread_names]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_keeps_the_rule(rule) -> None:
    problems = [problem for item in SOURCES for problem in rule(item)]
    assert not problems, "\n" + "\n".join(problems)


def test_any_is_rare() -> None:
    counts = {item.path: count_any(item) for item in SOURCES}
    most = sorted(counts, key=lambda path: -counts[path])[:5]
    assert sum(counts.values()) <= MAX_ANY, f"most are in {', '.join(f'{path} ({counts[path]})' for path in most)}"


def test_no_imports_go_in_a_circle() -> None:
    assert import_cycles(SOURCES) == []


# Negative controls.


def test_an_untyped_self_is_caught() -> None:
    text = "class C:\n    def f(self{}, x: Any) -> Any: ..."
    assert len(untyped_self(source("engine/engine.py", text.format(": Any")))) == 1
    assert not untyped_self(source("engine/engine.py", text.format("")))


def test_a_lost_file_is_caught() -> None:
    text = "# It is measured, see {0}.\nx = 1  # as `{0}` has it\n"
    assert len(lost_files(source("engine/engine.py", text.format("lost.py")))) == 2
    assert not lost_files(source("engine/engine.py", text.format("scheduler.py")))


@pytest.mark.parametrize("text", ["_A = 1", "_A: int = 1", "A, _B = 1, 2", "def _f(): ...", "class _C: ..."])
def test_an_unread_name_is_caught(text: str) -> None:
    assert len(unread_names(source("engine/engine.py", text))) == 1
    assert not unread_names(source("engine/engine.py", f"{text}\nprint(_A, _B, _f, _C)"))


def test_every_any_is_counted() -> None:
    text = """from typing import Any
def f(x: Any, *args: Any, y: dict[str, Any] | None = None) -> Any:
    z: list[Any] = cast(Any, x)
    Anything = "Any"  # Any
"""
    assert count_any(source("engine/engine.py", text)) == 6


CIRCLES = [
    {"a": "import llm.b", "b": "from llm import c", "c": "from llm.a import x"},
    {"a": "from .b import x", "b": "from . import a"},
    {"a": "import llm.b", "b": "def f():\n    from llm.a import x"},
    {"a": "if not TYPE_CHECKING:\n    import llm.b", "b": "class C:\n    import llm.a"},
    {"a": "import llm.b", "b": "if TYPE_CHECKING:\n    import llm.c\nelse:\n    import llm.a"},
]
NO_CIRCLES = [
    {"a": "import llm.b", "b": "import llm.c", "c": "import os"},
    {"a": "import llm.b", "b": "if TYPE_CHECKING:\n    from llm.a import x"},
    {"a": "import llm.b\nimport llm.c", "b": "import llm.d", "c": "import llm.d", "d": ""},
]


@pytest.mark.parametrize("texts", CIRCLES)
def test_a_circle_is_caught(texts: dict[str, str]) -> None:
    sources = [source(f"{name}.py", text) for name, text in texts.items()]
    circle = " <-> ".join(f"llm.{name}" for name in sorted(texts))
    assert import_cycles([*sources, source("outside.py", "import llm.a")]) == [circle]


@pytest.mark.parametrize("texts", NO_CIRCLES)
def test_a_way_down_is_no_circle(texts: dict[str, str]) -> None:
    assert import_cycles([source(f"{name}.py", text) for name, text in texts.items()]) == []
