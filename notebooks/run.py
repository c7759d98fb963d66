"""Run the notebooks and store them with what their cells show: `python notebooks/run.py [NAME ...]`.

A notebook records the digest of the sources that its outputs are of, so that a test can tell when
they are out of date. Paths of the checkout are shown as `offline-llm`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import nbclient
import nbformat
from jupyter_client import AsyncKernelManager

FOLDER = Path(__file__).resolve().parent
_CHECKOUT = FOLDER.parent
_RECORD = "sources_sha256"
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def execute(notebook: Any, folder: Path) -> Any:
    """Run every cell, in a kernel of this interpreter; raises `CellExecutionError` at the first that fails."""
    kernel = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=str(folder / "kernel"))
    return nbclient.NotebookClient(notebook, km=kernel, timeout=300).execute(cwd=str(folder))


def digest(notebook: Any) -> str:
    """SHA-256 of the cells' sources, in order."""
    return hashlib.sha256(json.dumps([[cell.cell_type, cell.source] for cell in notebook.cells]).encode()).hexdigest()


def recorded(notebook: Any) -> str:
    """The digest of the sources that the stored outputs are of; "" if this command never ran it."""
    return str(notebook.metadata.get(_RECORD, ""))


def kinds(notebook: Any) -> list[list[str]]:
    """What each code cell shows: "stdout", and the types of what it displays; not the progress of a slow call."""
    found = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            shown = {output.get("name") or "+".join(sorted(output.data)) for output in cell.outputs}
            found.append(sorted(shown - {"stderr", "text/plain"}))
    return found


def stored(notebook: Any) -> Any:
    """The executed notebook as it is stored: counted from 1, without times, and without paths of this machine."""
    for count, cell in enumerate((cell for cell in notebook.cells if cell.cell_type == "code"), 1):
        cell.metadata = {}
        cell.execution_count = count
        cell.outputs = [_without_paths(output) for output in cell.outputs if output.get("name") != "stderr"]
        for output in cell.outputs:
            if "execution_count" in output:
                output["execution_count"] = count
    notebook.metadata = nbformat.from_dict(_METADATA | {_RECORD: digest(notebook)})
    return notebook


def _without_paths(value: Any) -> Any:
    if isinstance(value, dict):
        return nbformat.from_dict({key: _without_paths(item) for key, item in value.items()})
    if isinstance(value, list):
        return [_without_paths(item) for item in value]
    return value.replace(str(_CHECKOUT), "offline-llm") if isinstance(value, str) else value


def main() -> None:
    parser = argparse.ArgumentParser(description="Run notebooks and store them with what their cells show.")
    parser.add_argument("names", nargs="*", help="beginnings of file names, such as 03 (default: all)")
    names = tuple(parser.parse_args().names) or ("",)
    for path in sorted(path for path in FOLDER.glob("*.ipynb") if path.name.startswith(names)):
        print(path.name, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(stored(execute(nbformat.read(path, as_version=4), Path(folder))), path)


if __name__ == "__main__":
    main()
