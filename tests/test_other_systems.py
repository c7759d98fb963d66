"""The library without what macOS and Windows lack (other_systems.py): the same answers, files and locks."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path
from typing import Any

import pytest
from embedded import ROOT, python
from other_systems import NO_MAC, NO_MODULES, NO_WINDOWS

PROGRAM = """
import contextlib, io, json, os, sys, urllib.request
if sys.argv[1] != "linux":
    import other_systems
    other_systems.pretend(sys.argv[1])
from pathlib import Path
from llm import LLM, SamplingParams, serve
from llm.base import system
from llm.cli import main
from llm.errors import LLMError
from llm.kernels.state import kernel_state
from llm.text import chat_template

told = {}
folder = Path(sys.argv[2])
with contextlib.redirect_stdout(io.StringIO()) as printed:
    told["status"] = main(["generate", "In the beginning", "--temperature", "0", "--max-tokens", "8"])
told["printed"] = printed.getvalue().splitlines()[0]
told["doctor"] = main(["doctor"]) in (0, 1)  # 1: it found something to do on this machine
params = SamplingParams(temperature=0, max_tokens=8)
with LLM(speculative_config=None) as llm:
    told["invariant"], told["kernels"] = llm.config.invariant, kernel_state().text.partition(",")[0]
    (folder / "in.jsonl").write_text("".join(json.dumps({"prompt": f"Verse {row}"}) + chr(10) for row in range(6)))
    llm.run(folder / "in.jsonl", folder / "out.jsonl", params, use_tqdm=False)
    told["rows"] = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    told["long"] = llm.generate("In the beginning " * 40, params, use_tqdm=False)[0].outputs[0].token_ids
    llm.save_prefix_cache(folder / "prompts")
    with serve(llm, port=0) as url:
        body = json.dumps({"prompt": "In the beginning", "max_tokens": 8, "temperature": 0}).encode()
        asked = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        told["served"] = json.load(urllib.request.urlopen(asked))["choices"][0]["text"]
with LLM(speculative_config=None, prefix_cache=folder / "prompts") as llm:
    again = llm.generate("In the beginning " * 40, params, use_tqdm=False)[0]
    told["again"], told["cached"] = again.outputs[0].token_ids, again.num_cached_tokens
for option, value in (("data_parallel_size", 2), ("tensor_parallel_size", 2), ("offload_weights", True)):
    try:
        with LLM(speculative_config=None, **{option: value}) as llm:
            told[option] = llm.generate("In the beginning", params, use_tqdm=False)[0].outputs[0].token_ids
    except LLMError as error:
        told[option] = str(error)
try:
    told["template"] = chat_template.PROCESS.render("{% for m in messages %}{{ m }}{% endfor %}", {"messages": ["a"]})
except chat_template.TemplateLimit as limit:
    told["template"] = f"TemplateLimit: {limit}"
file = open(folder / "lock", "w")
system.lock(file.fileno())
with open(folder / "lock") as other:
    try:
        system.lock(other.fileno())
        told["second lock"] = "held"
    except OSError:
        told["second lock"] = "refused"
system.replace(folder / "lock", folder / "renamed")
told["renamed"] = (folder / "renamed").exists()
told["memory"] = all(bytes > 0 for bytes in system.memory())
told["cores"] = len(system.cores()) > 0
json.dump(told, open(folder / "told.json", "w"))
"""


def told_on(name: str, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    done = python("-c", PROGRAM, name, str(folder), cwd=folder, env={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"})
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "told.json").read_text())


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("systems")
    return {name: told_on(name, folder / name) for name in ("linux", "darwin", "win32")}


@pytest.mark.parametrize("name", ["darwin", "win32"])
def test_answers_and_files_are_those_of_linux(name: str, told: dict[str, dict[str, Any]]) -> None:
    expected, found = dict(told["linux"]), dict(told[name])
    assert expected["status"] == 0 and expected["second lock"] == "refused" and len(expected["rows"]) == 6
    assert expected["again"] == expected["long"] and expected["cached"] > 0 and expected["served"]
    assert expected["data_parallel_size"] == expected["tensor_parallel_size"] == expected["offload_weights"]
    assert expected["invariant"]
    if name == "win32":  # no process there can be limited, and no file deleted while it is open
        assert found.pop("template").startswith("TemplateLimit: it is more than plain, and this system cannot limit")
        assert expected.pop("template") == "a"
        assert found.pop("tensor_parallel_size").startswith("tensor_parallel_size must be 1 on Windows")
        assert found.pop("offload_weights").startswith("offload_weights must be None or False on Windows")
        del expected["tensor_parallel_size"], expected["offload_weights"]
    assert found == expected


def test_what_is_hidden_is_missed(tmp_path: Path) -> None:
    """Planted: a module of `llm` that uses Linux's own calls fails there, and one of another package does not."""
    program = """
import other_systems
other_systems.pretend("win32")
for name in ("llm.planted", "another"):
    for code in (
        *("import fcntl", "import os; os.fork", "from signal import setitimer", "open('/proc/meminfo')"),
        "import pathlib; file = open('open', 'w'); pathlib.Path('open').unlink()",
    ):
        try:
            exec(code, {"__name__": name, "__builtins__": __builtins__})
            print(name, code, "ran", flush=True)
        except (ImportError, AttributeError, OSError) as error:
            print(name, code, type(error).__name__, flush=True)
import os, pathlib, subprocess, sys
pathlib.Path("llm").mkdir()
pathlib.Path("llm/role.py").write_text("import os; print('a worker', hasattr(os, 'fork'), flush=True)")
subprocess.run([sys.executable, os.getcwd() + "/llm/role.py"], check=True)
"""
    done = python("-c", program, cwd=tmp_path, env={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"})
    assert done.stdout.splitlines() == [
        "llm.planted import fcntl ImportError",
        "llm.planted import os; os.fork AttributeError",
        "llm.planted from signal import setitimer ImportError",
        "llm.planted open('/proc/meminfo') FileNotFoundError",
        "llm.planted import pathlib; file = open('open', 'w'); pathlib.Path('open').unlink() PermissionError",
        "another import fcntl ran",
        "another import os; os.fork ran",
        "another from signal import setitimer ran",
        "another open('/proc/meminfo') ran",
        "another import pathlib; file = open('open', 'w'); pathlib.Path('open').unlink() ran",
        "a worker False",
    ]


# Besides llm/base/system.py: the process that renders templates, POSIX's as a whole and refused on Windows, and
# a measurement that begins with /proc.
OF_SOME_SYSTEMS = {
    "llm/loading/shared_weights.py",  # of Linux alone, where replicas share weights
    *("llm/text/chat_template.py", "llm/text/template_child.py", "llm/tools/bench/machine.py"),
}


def of_some_systems(source: str) -> list[str]:
    """Names in a module that other_systems.py hides: "os.fork"."""
    hidden = {name: set(words.split()) for name, words in NO_MAC.items()}
    for name, words in NO_WINDOWS.items():
        hidden.setdefault(name, set()).update(words.split())
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found += [f"{node.value.id}.{node.attr}"] if node.attr in hidden.get(node.value.id, ()) else []
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name in NO_MODULES["win32"]]
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names if alias.name in hidden.get(node.module or "", ())]
            found += [f"{node.module}.{name}" for name in names]
            found += [node.module] if node.module in NO_MODULES["win32"] else []
    return found


def test_what_some_systems_lack_is_asked_for_in_one_module() -> None:
    found = {}
    for folder, _, names in os.walk(ROOT / "llm", followlinks=True):
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            if uses := of_some_systems(path.read_text("utf-8")):
                found[str(path.relative_to(ROOT))] = uses
    assert found.pop("llm/base/system.py")
    assert set(found) == OF_SOME_SYSTEMS
    planted = "import os, pwd\nfrom signal import alarm\nfrom fcntl import flock\nos.fork()\nos.getpid()\n"
    assert sorted(of_some_systems(planted)) == ["fcntl", "os.fork", "pwd", "signal.alarm"]
