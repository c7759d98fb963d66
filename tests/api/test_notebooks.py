"""The notebooks: each runs from top to bottom on the embedded model, and is stored without outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
from jupyter_client import AsyncKernelManager

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def execute(notebook: Any, folder: Path) -> Any:
    """Run every cell in a kernel of this interpreter; raises `CellExecutionError` at the first that fails."""
    kernel = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=str(folder / "kernel"))
    return nbclient.NotebookClient(notebook, km=kernel, timeout=300).execute(cwd=str(folder))


def streams(notebook: Any, name: str) -> str:
    """What the cells wrote to "stdout" or "stderr"."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output["text"] for output in outputs if output.get("name") == name)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_warns_of_nothing(path: Path, tmp_path: Path) -> None:
    done = execute(nbformat.read(path, as_version=4), tmp_path)
    assert streams(done, "stdout").strip()
    assert "Warning" not in streams(done, "stderr")
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("kernel")] == []  # so it can run again


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.cells[0].cell_type == "markdown"
    for cell in notebook.cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None, cell.source


def test_a_cell_that_fails_is_noticed(tmp_path: Path) -> None:
    cells = [nbformat.v4.new_code_cell("from llm import LLM\nLLM(max_model_len=-5)")]
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="max_model_len"):
        execute(nbformat.v4.new_notebook(cells=cells), tmp_path)
