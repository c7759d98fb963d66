"""What `mkdocs build` makes besides docs/: a page for each notebook, with what its cells show, and the version.

mkdocs.yml names this file under `hooks`. No notebook is run: notebooks/run.py has stored the outputs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parent.parent


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The site's name has the version, which every page shows."""
    found = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    if found is None:
        raise ValueError("pyproject.toml has no version")
    config.site_name = f"{config.site_name} {found[1]}"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        content = page_of(json.loads(path.read_text("utf-8")))
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=content))
    return files


def page_of(notebook: dict[str, Any]) -> str:
    """A notebook as Markdown: its texts, its code, and under each cell what it showed."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif source:
            parts += [_fenced(source, "python"), *_shown(cell["outputs"])]
    return "\n\n".join(parts) + "\n"


def _shown(outputs: list[dict[str, Any]]) -> Iterator[str]:
    said = ""
    for output in outputs:
        if output["output_type"] == "stream":
            said += "".join(output["text"])
            continue
        if said.strip():
            yield _fenced(said, "output")
        said = ""
        data = {kind: "".join(text) for kind, text in output.get("data", {}).items()}
        if "image/png" in data:
            yield f"![what the cell shows](data:image/png;base64,{''.join(data['image/png'].split())})"
        elif "text/html" in data:
            whole = [line for line in data["text/html"].splitlines() if line.strip()]  # a blank line ends the block
            yield "\n".join(('<div class="shown">', *whole, "</div>"))
        elif "text/plain" in data:
            yield _fenced(data["text/plain"], "output")
    if said.strip():
        yield _fenced(said, "output")


def _fenced(text: str, language: str) -> str:
    """A block of code; of a line that was written over, what stood there in the end."""
    lines = (line.rpartition("\r")[2] for line in text.rstrip("\n").replace("\r\n", "\n").split("\n"))
    return "\n".join((f"````{language}", *lines, "````"))
