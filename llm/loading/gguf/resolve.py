"""From what the user calls a model to a GGUF file, where it names one.

Owns the spellings: a path, a folder that holds GGUF files alone, `org/name:Q4_K_M` and `org/name/file.gguf` on the hub.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from llm.base.errors import CheckpointError, ValidationError
from llm.base.text import list_names, quote
from llm.loading.gguf.source import parts_of
from llm.loading.resolve import snapshot_of

_HUB_TYPE = re.compile(r"(\w[\w.-]*/\w[\w.-]*):([\w.-]+)", re.ASCII)
_HUB_FILE = re.compile(r"(\w[\w.-]*/\w[\w.-]*)/((?:\w[\w. -]*/)*\w[\w. -]*\.gguf)", re.ASCII)
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf", re.ASCII)


def resolve_gguf(model: str | Path, revision: str | None = None) -> Path | None:
    """The GGUF file that `model` names, None where it names none.

    Raises:
        CheckpointError: a folder or a hub model holds no such file, or several.
        ValidationError: `revision` is given for a local file.
    """
    if not isinstance(model, (str, Path)):
        return None
    path = Path(os.path.expanduser(model))
    if os.path.isfile(path) and path.suffix.lower() == ".gguf":
        if revision is not None:
            raise ValidationError(
                f"revision={revision!r} applies to hub models, but {str(model)!r} is a local file; leave revision out",
                parameter="revision",
                value=revision,
            )
        return path
    if os.path.isdir(path):
        return _only_file(path)
    folder, _, kind = str(model).rpartition(":")
    if folder and kind and os.path.isdir(os.path.expanduser(folder)):
        return _of_type(Path(os.path.expanduser(folder)), kind)
    return _on_hub(model, revision) if isinstance(model, str) and not os.path.exists(path) else None


def _only_file(folder: Path) -> Path | None:
    """Of a folder without config.json."""
    if os.path.exists(folder / "config.json"):
        return None
    files = _first_parts(folder)
    if len(files) > 1:
        raise CheckpointError(
            f"{folder} holds several GGUF files ({list_names(file.name for file in files)}); pass the path of one."
        )
    return files[0] if files else None


def _of_type(folder: Path, kind: str) -> Path:
    """The file of a type such as Q4_K_M, which its name ends in."""
    files = _files_of_type(folder, kind)
    if len(files) != 1:
        found = "several GGUF files" if files else "no GGUF file"
        names = list_names(file.name for file in files or _first_parts(folder)) or "none"
        raise CheckpointError(f"{folder} holds {found} of the type {quote(kind)}; of these pass one: {names}.")
    return files[0]


def _files_of_type(folder: Path, kind: str) -> list[Path]:
    ending = re.compile(rf"[-._]{re.escape(kind)}(-00001-of-\d{{5}})?\.gguf", re.IGNORECASE)
    return [file for file in _first_parts(folder) if ending.search(f"-{file.name}")]


def _first_parts(folder: Path) -> list[Path]:
    """GGUF files of the folder and those below it, of split models the first part; projectors of images left out."""
    found = sorted(file for pattern in ("*.gguf", "*/*.gguf") for file in folder.glob(pattern))
    names = [file for file in found if not file.name.startswith((".", "mmproj")) and file.is_file()]
    return [file for file in names if not _LATER_PART.search(file.name)]


def _on_hub(model: str, revision: str | None) -> Path | None:
    by_file, by_type = _HUB_FILE.fullmatch(model), _HUB_TYPE.fullmatch(model)
    if by_file is not None:
        name, file = by_file[1], by_file[2]
        part = re.sub(r"-\d{5}-of-(\d{5})\.gguf$", r"-*-of-\1.gguf", file)
        path = snapshot_of(name, revision, (part,), lambda folder: (folder / file).is_file()) / file
        if not path.is_file():
            raise CheckpointError(f"the hub model {name!r} has no file {quote(file)}.")
        parts_of(path)
        return path
    if by_type is None:
        return None
    name, kind = by_type[1], by_type[2]
    cases = dict.fromkeys((kind, kind.upper(), kind.lower()))
    endings = [ending for case in cases for ending in (case, f"{case}-*-of-*")]
    patterns = tuple(f"*{separator}{ending}.gguf" for ending in endings for separator in "-._")
    return _of_type(snapshot_of(name, revision, patterns, lambda folder: bool(_files_of_type(folder, kind))), kind)
