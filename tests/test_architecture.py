"""The rules the whole package keeps, read from its source by `ast`: which way imports point, and what never appears.

A new file that no entry of the table of floors covers fails until it is placed. Every rule has a negative control.
"""

from __future__ import annotations

import ast
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "llm"
NOT_SOURCE = {"__pycache__", "work"}  # llm/assets/tiny/work holds checkpoints of a training run
ROOMS = ("layers", "quantization", "platforms", "kernels")

# Module or package -> floor; the longest match wins. An import may point at its own floor or below.
FLOORS = {
    "llm.base": 1,
    "llm.config": 1,
    "llm.sampling_params": 1,
    "llm.errors": 1,
    "llm.forward": 1,
    "llm.inputs": 1,
    "llm.inside": 1,
    "llm.inside.sites": 6,
    "llm.inside.control_vector": 8,
    "llm.inside.experiments": 8,
    "llm.logger": 1,
    "llm.outputs": 1,
    "llm.output_formats": 1,
    "llm.plugins": 1,
    "llm.pooling_params": 1,
    "llm.progress": 1,
    "llm.platforms": 1,
    "llm.kernels": 2,
    "llm.quantization": 3,
    "llm.layers": 4,
    "llm.models": 5,
    "llm.loading": 6,
    "llm.sampling": 6,
    "llm.text": 6,
    "llm.engine": 7,
    "llm.workers": 7,
    "llm.runner": 8,
    "llm.explain": 7,
    "llm.llm": 8,
    "llm.async_llm": 8,
    "llm.llm_engine": 8,
    "llm.calls": 8,
    "llm.jobs": 8,
    "llm.cli": 8,
    "llm.lm_eval": 8,
    "llm.prefix_cache": 8,
    "llm.ray": 8,
    "llm.replicas": 8,
    "llm.setup": 8,
    "llm.tools": 8,
    "llm.__main__": 8,
    "llm.assets": 8,
}
# `from llm import LLM` resolves a public name, and those live at the top.
PUBLIC_NAMES_FLOOR = 8

BANNED_MODULES = {
    "_pickle": "pickle runs code from the file",
    "cloudpickle": "pickle runs code from the file",
    "dill": "pickle runs code from the file",
    "joblib": "pickle runs code from the file",
    "pickle": "pickle runs code from the file",
    "shelve": "pickle runs code from the file",
    "socket": "the network is the hub client's business",
    "socketserver": "this is no server",
    "subprocess": "the engine runs in the user's process",
}
# (file under llm/, what it uses) -> why that is right.
ALLOWED = {
    ("kernels/cpu/build.py", "subprocess"): "the compiler, once per machine",
    ("kernels/triton/check.py", "subprocess"): "a kernel that faults ends its process's use of the device, not ours",
    (
        "text/chat_template.py",
        "subprocess",
    ): "chat templates that are more than plain; an interpreter of its own, isolated",
    (
        "workers/on_ray.py",
        "subprocess",
    ): "the class of the error that `wait` raises; the actor's process is process.py's",
    ("workers/process.py", "subprocess"): "workers of `data_parallel_size`, an interpreter each",
    **{
        (f"workers/{name}.py", "socket"): "the socket pair between a worker and its program; nothing listens"
        for name in ("process", "connection", "served", "on_ray")
    },
    ("base/system.py", "socket"): "how a worker gets its end of the pair, on each system",
    ("tools/serve/server.py", "socket"): "the port of `serve`; nothing else listens, and nothing imports it",
}


@dataclass(frozen=True)
class Source:
    """One parsed file. `path` is under llm/, through the links; `module` is its dotted name."""

    path: str
    module: str
    text: str

    @property
    def is_init(self) -> bool:
        return self.path.endswith("__init__.py")

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=self.path)

    def at(self, node: ast.AST, problem: str) -> str:
        return f"llm/{self.path}:{getattr(node, 'lineno', 1)}: {problem}"


def source(path: str, text: str) -> Source:
    parts = ["llm", *Path(path).with_suffix("").parts]
    return Source(path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts), text)


def package_sources() -> list[Source]:
    found = []
    for folder, subfolders, names in os.walk(PACKAGE, followlinks=True):
        subfolders[:] = sorted(set(subfolders) - NOT_SOURCE)
        paths = [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
        found += [source(str(path.relative_to(PACKAGE)), path.read_text("utf-8")) for path in paths]
    return found


SOURCES = package_sources()
MODULES = frozenset(item.module for item in SOURCES)


def covered(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def floor_of(module: str) -> int | None:
    """Return the floor of a module, None when the table does not place it."""
    matches = [prefix for prefix in FLOORS if covered(module, prefix)]
    return FLOORS[max(matches, key=len)] if matches else None


def imported_names(item: Source) -> Iterator[tuple[ast.AST, str]]:
    """Yield (node, absolute dotted name) of every import, wherever it stands; relative ones resolved."""
    package = item.module if item.is_init else item.module.rpartition(".")[0]
    for node in ast.walk(item.tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                ancestors = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*ancestors, *([base] if base else [])])
            yield from ((node, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and called_name(node) in {"import_module", "__import__"} and node.args:
            yield node, str(getattr(node.args[0], "value", ""))


def called_name(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def target_floor(name: str, modules: frozenset[str]) -> int | None:
    """Return the floor an imported name stands on: its module's, or its package's `__init__` when it is no module."""
    packages = {module.rpartition(".")[0] for module in modules}
    module = name
    while module not in modules | packages:
        module = module.rpartition(".")[0]
    if module != "llm":
        return floor_of(module)
    return floor_of(name) or PUBLIC_NAMES_FLOOR


def upward_imports(item: Source, modules: frozenset[str] = MODULES) -> list[str]:
    if item.module == "llm":
        return []  # the public names, loaded lazily, are all it owns
    own = floor_of(item.module)
    if own is None:
        return [item.at(item.tree, f"{item.module} is on no floor; place it in FLOORS")]
    problems = []
    for node, name in imported_names(item):
        if not covered(name, "llm"):
            continue
        floor = target_floor(name, modules | {item.module})
        if floor is None or floor > own:
            problems.append(item.at(node, f"{item.module} (floor {own}) -> {name} (floor {floor}) points up"))
    return problems


def unprefixed_imports(item: Source) -> list[str]:
    return [
        item.at(node, f"imports {name}; write llm.{name}")
        for node, name in imported_names(item)
        if name.partition(".")[0] in ROOMS
    ]


def unsafe_uses(item: Source) -> list[str]:
    """Banned modules, `torch.load`, `os.system` and its like, and `trust_remote_code` set to anything but False."""
    found: list[tuple[ast.AST, str, str]] = []
    for node, name in imported_names(item):
        top = name.partition(".")[0]
        if top in BANNED_MODULES:
            found.append((node, top, BANNED_MODULES[top]))
        if name in {"torch.load", "os.system", "os.popen"}:
            found.append((node, name, "never used here"))
    for node in ast.walk(item.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = f"{node.value.id}.{node.attr}"
            if name in {"torch.load", "os.system", "os.popen"}:
                found.append((node, name, "never used here"))
        if trusts_remote_code(node):
            found.append((node, "trust_remote_code", "a checkpoint never brings code"))
    return [item.at(node, f"{name}: {why}") for node, name, why in found if (item.path, name) not in ALLOWED]


def trusts_remote_code(node: ast.AST) -> bool:
    """True for `f(trust_remote_code=True)`, `{"trust_remote_code": True}`, and a `from_pretrained` given a variable."""
    if isinstance(node, ast.Dict):
        keys = [getattr(key, "value", None) for key in node.keys]
        return any(key == "trust_remote_code" and is_true(value) for key, value in zip(keys, node.values, strict=True))
    if not isinstance(node, ast.Call):
        return False
    values = [keyword.value for keyword in node.keywords if keyword.arg == "trust_remote_code"]
    if called_name(node) == "from_pretrained":
        return any(getattr(value, "value", None) is not False for value in values)
    return any(is_true(value) for value in values)


def is_true(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def quiet_failures(item: Source) -> list[str]:
    """Bare `except`, a caught `Exception` that is dropped, and `assert`, which `python -O` removes."""
    problems = []
    for node in ast.walk(item.tree):
        if isinstance(node, ast.Assert):
            problems.append(item.at(node, "assert; raise an exception instead"))
        elif isinstance(node, ast.ExceptHandler) and node.type is None:
            problems.append(item.at(node, "bare except; name the exceptions"))
        elif isinstance(node, ast.ExceptHandler) and catches_everything(node.type) and does_nothing(node.body):
            problems.append(item.at(node, "every exception is caught and dropped"))
        elif isinstance(node, ast.Call) and called_name(node) == "suppress" and any(map(catches_everything, node.args)):
            problems.append(item.at(node, "every exception is suppressed"))
    return problems


def catches_everything(node: ast.AST | None) -> bool:
    names = node.elts if isinstance(node, ast.Tuple) else [node]
    return any(getattr(name, "id", "") in {"Exception", "BaseException"} for name in names)


def does_nothing(body: list[ast.stmt]) -> bool:
    return all(
        isinstance(stmt, ast.Pass | ast.Continue)
        or (isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Constant))
        for stmt in body
    )


def runner_methods() -> frozenset[str]:
    """The methods of the boundary, `llm.engine.boundary.Runner`."""
    (text,) = (item.text for item in SOURCES if item.module == "llm.engine.boundary")
    classes = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef))
    (protocol,) = (node for node in classes if node.name == "Runner")
    return frozenset(node.name for node in protocol.body if isinstance(node, ast.FunctionDef))


def looks_into_the_runner(item: Source) -> list[str]:
    """`engine.runner.model` and its like: a runner may live in another process, and is asked by its methods alone."""
    allowed = RUNNER_METHODS
    return [
        item.at(node, f"looks at the runner's {node.attr}; ask it by a method of llm.engine.boundary.Runner")
        for node in ast.walk(item.tree)
        if isinstance(node, ast.Attribute) and node.attr not in allowed and is_runner(node.value)
        # What a runner is made of may look at it.
        if item.module not in ("llm.runner.profile", "llm.runner.model_runner")
    ]


def is_runner(node: ast.AST) -> bool:
    return getattr(node, "attr", getattr(node, "id", "")) in {"runner", "_runner"}


RUNNER_METHODS = runner_methods()


def missing_docstring(item: Source) -> list[str]:
    return [] if ast.get_docstring(item.tree) else [item.at(item.tree, "does not open with a docstring")]


# What a backend is made of: only kernels/ imports it or knows its names.
BACKEND_PACKAGES = ("llm.kernels.cpu",)
BACKEND_ATTRIBUTES = {"library", "has_tiles"}
INSTRUCTION_SETS = {"avx2", "avx2_vnni", "avx512", "avx512_vnni", "amx"}


def backend_internals(item: Source) -> list[str]:
    """Uses of a shared library, of matrix tiles or of an instruction set's name outside of kernels/."""
    if covered(item.module, "llm.kernels"):
        return []
    problems = []
    for node, name in imported_names(item):
        if any(covered(name, package) for package in BACKEND_PACKAGES):
            problems.append(item.at(node, f"imports {name}; ask llm.kernels.backend"))
    for node in ast.walk(item.tree):
        if isinstance(node, ast.Attribute) and node.attr.lstrip("_") in BACKEND_ATTRIBUTES:
            problems.append(item.at(node, f"asks for .{node.attr}; ask the Backend what it promises"))
        elif isinstance(node, ast.Constant) and node.value in INSTRUCTION_SETS:
            problems.append(item.at(node, f"names the instruction set {node.value!r}"))
    return problems


RULES = [
    *(looks_into_the_runner, backend_internals),
    *(upward_imports, unprefixed_imports, unsafe_uses, quiet_failures, missing_docstring),
]


def test_the_walk_goes_through_the_links() -> None:
    rooms = {item.module.split(".")[1] for item in SOURCES if "." in item.module}
    assert rooms >= set(ROOMS), f"no file seen in {sorted(set(ROOMS) - rooms)}"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_keeps_the_rule(rule) -> None:
    problems = [problem for item in SOURCES for problem in rule(item)]
    assert not problems, "\n" + "\n".join(problems)


def test_tests_import_the_rooms_by_their_full_name() -> None:
    paths = sorted((ROOT / "tests").rglob("*.py"))
    problems = [problem for path in paths for problem in unprefixed_imports(source(path.name, path.read_text("utf-8")))]
    assert not problems, "\n" + "\n".join(problems)


def test_every_allowance_is_used() -> None:
    seen = {item.path: item.text for item in SOURCES}
    stale = [(path, name) for path, name in ALLOWED if name not in seen.get(path, "")]
    assert not stale, f"remove from ALLOWED: {stale}"


# Negative controls: each rule turns red on a planted violation, and on that alone.

MADE_UP = frozenset(
    {"llm", "llm.base", "llm.base.custom_op", "llm.layers", "llm.layers.linear", "llm.engine", "llm.engine.engine"}
)


@pytest.mark.parametrize(
    "text",
    [
        "import llm.engine.engine",
        "from llm.engine import engine",
        "from llm.engine.engine import Engine",
        "from ..engine import engine",
        "from ..engine.engine import Engine as E",
        "from .. import engine",
        "from llm import LLM",
        "import llm",
        "def f():\n    from llm.engine.engine import Engine",
        "if TYPE_CHECKING:\n    from llm.engine.engine import Engine",
        "import importlib\nengine = importlib.import_module('llm.engine.engine')",
    ],
)
def test_an_upward_import_is_caught(text: str) -> None:
    problems = upward_imports(source("layers/linear.py", text), MADE_UP)
    line = len(text.splitlines())
    assert len(problems) == 1
    assert problems[0].startswith(f"llm/layers/linear.py:{line}: llm.layers.linear (floor 4) -> llm")
    assert problems[0].endswith("points up")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("engine/engine.py", "from llm.layers.linear import Linear\nfrom ..layers import linear\nfrom . import engine"),
        ("platforms/cpu.py", "from llm.base.custom_op import CustomOp"),
        ("layers/linear.py", "import torch\nfrom ..base.custom_op import CustomOp\nimport llmx.engine"),
    ],
)
def test_a_downward_import_passes(path: str, text: str) -> None:
    assert upward_imports(source(path, text), MADE_UP) == []


@pytest.mark.parametrize("path", ["surprise.py", "surprises/inner.py"])
def test_an_unplaced_file_is_caught(path: str) -> None:
    assert "place it in FLOORS" in upward_imports(source(path, ""), MADE_UP)[0]


@pytest.mark.parametrize(
    "text",
    [
        "from llm.kernels.cpu.library import Library",
        "from llm.kernels import cpu",
        "def f():\n    import llm.kernels.cpu.program",
        "fast = backend.library is not None",
        "fast = self._library.has_nothing",
        "fast = target.has_tiles",
        "fast = target == 'amx'",
    ],
)
def test_a_look_inside_a_backend_is_caught(text: str) -> None:
    assert len(backend_internals(source("engine/engine.py", text))) == 1
    assert backend_internals(source("kernels/bench.py", text)) == []
    asks = "from llm.kernels.backend import Backend\nx = 'amx or none'"
    assert backend_internals(source("engine/engine.py", asks)) == []


@pytest.mark.parametrize(
    "text", ["import kernels", "from layers.linear import Linear", "import quantization.base as b"]
)
def test_an_import_without_the_prefix_is_caught(text: str) -> None:
    assert len(unprefixed_imports(source("layers/linear.py", text))) == 1
    assert unprefixed_imports(source("layers/linear.py", "from .. import kernels\nimport llm.layers.linear")) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import socket",
        "def f():\n    import subprocess as s",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "import os\nos.system('ls')",
        "f(trust_remote_code=True)",
        "f(**{'trust_remote_code': True})",
        "AutoTokenizer.from_pretrained(path, trust_remote_code=flag)",
    ],
)
def test_an_unsafe_use_is_caught(text: str) -> None:
    assert len(unsafe_uses(source("loading/checkpoint.py", text))) == 1


def test_a_safe_use_passes() -> None:
    text = "import torch, os\ntorch.ones(2)\nos.path.join('a')\nT.from_pretrained(path, trust_remote_code=False)"
    assert unsafe_uses(source("loading/checkpoint.py", text)) == []


@pytest.mark.parametrize(
    "text",
    [
        "assert x",
        "try:\n    f()\nexcept:\n    raise",
        "try:\n    f()\nexcept Exception:\n    pass",
        "try:\n    f()\nexcept (ValueError, BaseException) as error:\n    ...",
        "with contextlib.suppress(Exception):\n    f()",
    ],
)
def test_a_quiet_failure_is_caught(text: str) -> None:
    assert len(quiet_failures(source("engine/engine.py", text))) == 1


def test_a_loud_failure_passes() -> None:
    text = "try:\n    f()\nexcept OSError:\n    pass\nexcept Exception:\n    close()\n    raise"
    assert quiet_failures(source("engine/engine.py", text)) == []


@pytest.mark.parametrize(
    "text",
    [
        "llm._engine.runner.model",
        "self.runner.batch.num_tokens",
        "runner = engine.runner\nrunner.sampler = None",
        "def f(runner):\n    return runner.platform.name",
        "del self._runner.kv_caches",
    ],
)
def test_a_look_into_the_runner_is_caught(text: str) -> None:
    assert len(looks_into_the_runner(source("api.py", text))) == 1


def test_asking_the_runner_passes() -> None:
    text = "self.runner.execute(plan)\nengine.runner.describe().parts\nrunner = engine.runner\nargs.runner"
    assert looks_into_the_runner(source("api.py", text)) == []
    assert {"load", "execute", "describe", "save", "set_processors", "close"} <= RUNNER_METHODS


def test_a_missing_docstring_is_caught() -> None:
    assert missing_docstring(source("engine/engine.py", "import os"))
    assert not missing_docstring(source("engine/engine.py", '"""Owns the loop."""'))


# Files that name an example for reasons of their own: a model that has it, what is measured or drafted with it, a list
# of what another backend has.
ALSO: dict[str, set[str]] = {
    "presence_penalty": {"llm/runner/speculation/draft_model.py", "llm/tools/bench/sampler.py"},
    "relu2": {
        *(f"llm/models/{name}.py" for name in ("decoder/mlp", "gpt_neox", "llama", "mamba")),
        *("kernels/reference/experts.py", "kernels/torch_ops.py", "kernels/triton/backend.py", "kernels/triton/moe.py"),
    },
    "q8_0": set(),
}
MOST_FILES = {"a sampling parameter": 3, "an activation": 4, "a scheme of `quantization=`": 4}


def files_naming(name: str) -> set[str]:
    """Files of the package in which `name` is an identifier or a whole string; texts that mention it do not count."""
    paths = [item.path for item in SOURCES if name in names_in(item.tree)]
    return {path if path.startswith(ROOMS) else f"llm/{path}" for path in paths}


def names_in(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        values = (getattr(node, field, None) for field in ("id", "attr", "arg", "name", "value"))
        found.update(value for value in values if isinstance(value, str))
    return found


def test_what_is_added_changes_few_files() -> None:
    """The table of docs/architecture.md: its files are there, few, and no other needs to know the example."""
    table = (
        (ROOT / "docs" / "architecture.md")
        .read_text("utf-8")
        .partition("## What to change to add")[2]
        .partition("\n## ")[0]
    )
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| a")]
    assert [row[0] for row in rows] == list(MOST_FILES)
    for what, text, example in rows:
        files = [part for part in text.split("`")[1::2] if "/" in part]
        assert len(files) <= MOST_FILES[what] and all((ROOT / file).is_file() for file in files)
        name = example.strip("`")
        naming = files_naming(name)
        assert naming - ALSO[name] <= set(files), name
        assert len(naming & set(files)) >= 2 and ALSO[name] <= naming


def test_a_file_that_names_an_example_is_found() -> None:
    assert names_in(ast.parse("def f(x): return x.presence_penalty")) == {"f", "x", "presence_penalty"}
    assert "q8_0" in names_in(ast.parse("TABLE = {'q8_0': 1}"))
    assert "q8_0" not in names_in(ast.parse("'as q8_0 does'"))
