"""The suite at an end of the ranges that pyproject.toml claims.

    python tests/versions.py lowest                  # every dependency and extra at its lower bound
    python tests/versions.py newest tests/models     # at the newest the bounds allow; arguments go to pytest
    python tests/versions.py lowest --torch 2.13.0   # PyTorch at this version
    python tests/versions.py lowest --list           # what would be installed
    python tests/versions.py here tests/api          # what is installed in this environment
    python tests/versions.py without-kernels tests/api tests/jobs  # here, with PyTorch's operations; a row for each

Each run writes what passed into its row of a table of docs/howto/install.md. "lowest" and "newest" install into a
virtual environment of their own, which is deleted afterwards. Tools of development (pytest, ruff, mypy and the like)
are the newest in both.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "howto" / "install.md"
# The packages whose versions the table has.
SHOWN = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy")
_TABLES = {"versions": "<!-- versions -->", "kernels": "<!-- without kernels -->"}
# What a user's program imports; of the extras too.
_RANGE = re.compile(r'^\s*(?:structured = \[)?"([a-z0-9-]+)>=([0-9.]+)', re.MULTILINE)
_TOOLS = {"pytest", "pytest-xdist", "hypothesis", "ruff", "mypy", "build", "setuptools", "jsonschema", "nbclient"}


def lower_bounds(pyproject: str) -> dict[str, str]:
    """Package -> the lowest version claimed, of all that a user's program can import."""
    return {name: version for name, version in _RANGE.findall(pyproject) if name not in _TOOLS}


def requirements(end: str, pyproject: str) -> list[str]:
    """What pip is asked for beside the project: nothing for "newest"."""
    return [f"{name}=={version}.*" for name, version in lower_bounds(pyproject).items()] if end == "lowest" else []


def written(page: str, row: Sequence[str], table: str = "versions") -> str:
    """The page with the row in its table, in the place of one with the same cells but for the last two, result and
    commit."""
    mark = _TABLES[table]
    before, _, rest = page.partition(mark)
    table, end, after = rest.partition("\n\n")
    if not end:
        raise ValueError(f"the page has no table after {mark!r}")
    head, line, *rows = table.strip().splitlines()
    new = f"| {' | '.join(row)} |"
    key = row[:-2]
    kept = [old for old in rows if [cell.strip() for cell in old.strip("|").split("|")][: len(key)] != list(key)]
    return f"{before}{mark}\n{chr(10).join((head, line, *sorted((*kept, new))))}{end}{after}"


def results(junit: Path) -> str:
    """What pytest has counted, as "12 passed, 1 failed"."""
    suites = list(ElementTree.parse(junit).iter("testsuite"))
    names = ("tests", "failures", "errors", "skipped")
    count = {name: sum(int(suite.get(name, 0)) for suite in suites) for name in names}
    failed = count["failures"] + count["errors"]
    parts = {"passed": count["tests"] - failed - count["skipped"], "failed": failed, "skipped": count["skipped"]}
    return ", ".join(f"{number:,} {what}" for what, number in parts.items() if number or what == "passed")


def run_tests(python: str, tests: Sequence[str], **environment: str) -> tuple[str, str, int]:
    """(what pytest counted, the commit, pytest's status)."""
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder, "results.xml")
        command = [python, "-m", "pytest", f"--junitxml={junit}", *tests]
        status = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, check=False).returncode
        commit = subprocess.run(["git", "-C", ROOT, "log", "-1", "--format=%h"], check=True, capture_output=True)
        return results(junit), commit.stdout.decode().strip(), status


def write(row: Sequence[str], table: str) -> None:
    PAGE.write_text(written(PAGE.read_text("utf-8"), row, table), "utf-8")


def run_versions(python: str, tests: Sequence[str]) -> int:
    listed = subprocess.run([python, "-m", "pip", "list", "--format=json"], check=True, capture_output=True)
    found = {package["name"].replace("-", "_"): package["version"] for package in json.loads(listed.stdout)}
    own = "{}.{}".format(*sys.version_info)
    counted, commit, status = run_tests(python, tests)
    write((own, *(found[name] for name in SHOWN), " ".join(tests) or "all", counted, commit), "versions")
    return status


def main(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] not in ("lowest", "newest", "here", "without-kernels"):
        print(__doc__)
        return 2
    end, *rest = arguments
    if end == "here":
        return run_versions(sys.executable, rest)
    if end == "without-kernels":
        worst = 0
        for tests in rest:
            counted, commit, status = run_tests(sys.executable, [tests], LLM_CPU_ISA="none")
            write((tests, counted, commit), "kernels")
            worst = max(worst, status)
        return worst
    asked = requirements(end, (ROOT / "pyproject.toml").read_text())
    if rest[:1] == ["--torch"]:
        asked = [*(name for name in asked if not name.startswith("torch==")), f"torch=={rest[1]}"]
        rest = rest[2:]
    if rest == ["--list"]:
        print("\n".join(asked))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = str(Path(folder) / "bin" / "python")
        subprocess.run([python, "-m", "pip", "install", "--quiet", "-e", f"{ROOT}[test]", *asked], check=True)
        return run_versions(python, rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
