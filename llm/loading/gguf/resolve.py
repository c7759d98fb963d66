"""From what the user calls a model to a GGUF file, where it names one.

The spellings are a path, a folder that holds GGUF files alone, and on the hub `org/name:Q4_K_M`, `org/name/file.gguf`
and `org/name` of a model that has one GGUF file and no safetensors.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from llm.base.text import list_names, quote
from llm.errors import CheckpointError, ValidationError
from llm.loading.gguf.source import part_names, parts_of
from llm.loading.resolve import cached_folder, cached_snapshot, hub_files, is_hub_name, snapshot_of

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
    return [file for file in _first_parts(folder) if _is_of_type(file.name, kind)]


def _is_of_type(path: str, kind: str) -> bool:
    ending = re.compile(rf"[-._]{re.escape(kind)}(-00001-of-\d{{5}})?\.gguf", re.IGNORECASE)
    return ending.search(f"-{path.rpartition('/')[2]}") is not None


def _first_parts(folder: Path) -> list[Path]:
    """GGUF files of the folder and those below it, of split models the first part; projectors of images left out."""
    found = sorted(file for pattern in ("*.gguf", "*/*.gguf") for file in folder.glob(pattern))
    return [file for file in found if _is_first(file.name) and file.is_file()]


def _is_first(path: str) -> bool:
    name = path.rpartition("/")[2]
    return not name.startswith((".", "mmproj")) and not _LATER_PART.search(name)


def _on_hub(model: str, revision: str | None) -> Path | None:
    name, file, kind = _spelled(model)
    if not name or (not file and not kind and cached_folder(name, revision) is not None):
        return None
    cached = find_cached(model, revision)
    if cached is not None and (file or kind):
        return cached
    try:
        files = hub_files(name, revision)
    except CheckpointError:
        if file or kind:
            raise
        return cached  # the only one that there is without the hub; None: `resolve_folder` says what is wrong
    chosen = choose_on_hub(model, files)
    if chosen is None:
        return None
    patterns = tuple(map(glob.escape, chosen.parts))
    folder = snapshot_of(name, revision, patterns, lambda folder: _has_all(folder, chosen.parts))
    parts_of(folder / chosen.file)
    return folder / chosen.file


@dataclass(frozen=True)
class HubGguf:
    """A GGUF file on the hub: the model's name, the file, and all files of a split model."""

    name: str
    file: str
    parts: tuple[str, ...]


def choose_on_hub(model: str, files: Collection[str]) -> HubGguf | None:
    """The file that `org/name`, `org/name:TYPE` or `org/name/file.gguf` names; None: a model in another format.

    Args:
        files: all that the hub has of the model.

    Raises:
        CheckpointError: there is no such file, or there are several.
    """
    name, file, kind = _spelled(model)
    firsts = [path for path in sorted(files) if path.endswith(".gguf") and _is_first(path)]
    if file:
        found = [file] if file in files else []
    elif kind:
        found = [path for path in firsts if _is_of_type(path, kind)]
    elif not name or not firsts or any(path.endswith(".safetensors") and "/" not in path for path in files):
        return None
    else:
        found = firsts
    if len(found) != 1:
        of = f" of the type {quote(kind)}" if kind else f" {quote(file)}" if file else ""
        shown = found or firsts
        instead = f"; pass one of them, such as {f'{name}/{shown[0]}'!r}: {list_names(shown)}" if shown else ""
        what = "several GGUF files" if found else "no GGUF file"
        raise CheckpointError(f"the hub model {name!r} has {what}{of}{instead}.")
    return HubGguf(name, found[0], tuple(part.as_posix() for part in part_names(Path(found[0]))))


def _spelled(model: str) -> tuple[str, str, str]:
    """(hub name, file, type) of the three spellings; "" for what is not said, and three times for what is no name."""
    if by_file := _HUB_FILE.fullmatch(model):
        return by_file[1], by_file[2], ""
    if by_type := _HUB_TYPE.fullmatch(model):
        return by_type[1], "", by_type[2]
    return (model, "", "") if is_hub_name(model) else ("", "", "")


def hub_name_of(model: str) -> str:
    """The hub model of a spelling; "": it is none."""
    return _spelled(model)[0]


def find_cached(model: str, revision: str | None) -> Path | None:
    """The one file of the hub cache that a spelling means, with all its parts; never asks the hub."""
    name, file, kind = _spelled(model)
    folder = cached_snapshot(name, revision) if name else None
    if folder is None:
        return None
    found = [folder / file] if file else _files_of_type(folder, kind) if kind else _first_parts(folder)
    whole = len(found) == 1 and found[0].is_file() and all(part.is_file() for part in part_names(found[0]))
    return found[0] if whole else None


def _has_all(folder: Path, parts: Sequence[str]) -> bool:
    return all((folder / part).is_file() for part in parts)
