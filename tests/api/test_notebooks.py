"""The notebooks: each runs from top to bottom on the embedded model, and is stored with what its cells show.

The long ones run with TEST_ALL_NOTEBOOKS=1 alone. Set it when you change what they show. Number 10 is of a published
model, and is run by hand: `INSIDE_MODEL=... python notebooks/run.py 10`.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
from embedded import ROOT
from kernel_sets import needs_kernels

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LONG = ("03", "05", "08", "09")
OFFLOADED = ("04",)  # weights in a file are read by the kernels alone
BY_HAND = ("10",)  # it needs a published model
_spec = importlib.util.spec_from_file_location("run_notebooks", ROOT / "notebooks" / "run.py")
assert _spec is not None and _spec.loader is not None
run = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(run)


def streams(notebook: Any, name: str) -> str:
    """What the cells wrote to "stdout" or "stderr"."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output["text"] for output in outputs if output.get("name") == name)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=needs_kernels) if path.name.startswith(OFFLOADED) else path
        for path in NOTEBOOKS
        if not path.name.startswith(BY_HAND)
        and (os.environ.get("TEST_ALL_NOTEBOOKS") == "1" or not path.name.startswith(LONG))
    ],
    ids=lambda path: path.stem,
)
def test_a_notebook_runs_and_warns_of_nothing(path: Path, tmp_path: Path) -> None:
    before = run.kinds(nbformat.read(path, as_version=4))
    done = run.execute(nbformat.read(path, as_version=4), tmp_path)
    assert streams(done, "stdout").strip()
    assert "Warning" not in streams(done, "stderr")
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("kernel")] == []  # so it can run again
    assert run.kinds(run.stored(done)) == before


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_as_its_cells_ran(path: Path) -> None:
    """`python notebooks/run.py` stores what the cells of now show."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.cells[0].cell_type == "markdown"
    assert run.recorded(notebook) == run.digest(notebook)
    assert streams(notebook, "stdout") and not streams(notebook, "stderr")
    assert not [word for word in ("/tmp/", "/home/", "/root/", str(ROOT)) if word in path.read_text("utf-8")]


def test_a_changed_cell_and_a_lost_output_are_seen() -> None:
    notebook = nbformat.read(NOTEBOOKS[0], as_version=4)
    before = run.kinds(notebook)
    next(cell for cell in notebook.cells if any("name" in output for output in cell.get("outputs", []))).outputs.clear()
    assert run.kinds(notebook) != before and run.digest(notebook) == run.recorded(notebook)
    notebook.cells[1].source += "\nllm.config"
    assert run.digest(notebook) != run.recorded(notebook)


def test_a_cell_that_fails_is_noticed(tmp_path: Path) -> None:
    cells = [nbformat.v4.new_code_cell("from llm import LLM\nLLM(max_model_len=-5)")]
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="max_model_len"):
        run.execute(nbformat.v4.new_notebook(cells=cells), tmp_path)
