"""The suite at an end of the ranges that pyproject.toml claims.

    python tests/versions.py lowest                  # every dependency and extra at its lower bound
    python tests/versions.py newest tests/models     # at the newest the bounds allow; arguments go to pytest
    python tests/versions.py lowest --list           # what would be installed

Owns no tests. Installs into a virtual environment of its own, which is deleted afterwards. Tools of development
(pytest, ruff, mypy and the like) are the newest in both.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What a user's program imports; of the extras too.
_RANGE = re.compile(r'^\s*(?:structured = \[)?"([a-z0-9-]+)>=([0-9.]+)', re.MULTILINE)
_TOOLS = {"pytest", "pytest-xdist", "hypothesis", "ruff", "mypy", "build", "setuptools", "jsonschema", "nbclient"}


def lower_bounds(pyproject: str) -> dict[str, str]:
    """Package -> the lowest version claimed, of all that a user's program can import."""
    return {name: version for name, version in _RANGE.findall(pyproject) if name not in _TOOLS}


def requirements(end: str, pyproject: str) -> list[str]:
    """What pip is asked for beside the project: nothing for "newest"."""
    return [f"{name}=={version}.*" for name, version in lower_bounds(pyproject).items()] if end == "lowest" else []


def main(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] not in ("lowest", "newest"):
        print(__doc__)
        return 2
    end, *rest = arguments
    asked = requirements(end, (ROOT / "pyproject.toml").read_text())
    if rest == ["--list"]:
        print("\n".join(asked))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = str(Path(folder) / "bin" / "python")
        subprocess.run([python, "-m", "pip", "install", "--quiet", "-e", f"{ROOT}[test]", *asked], check=True)
        subprocess.run([python, "-m", "pip", "freeze", "--exclude-editable"], check=True)
        return subprocess.run([python, "-m", "pytest", *rest], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
