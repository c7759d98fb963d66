"""Reading the small files of a model folder, which were written by others."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from llm.base.text import clip, quote
from llm.base.types import JsonObject
from llm.errors import CheckpointError

# What may lie beside the weights, apart from the index of their shards.
SMALL_FILES = ("*.json", "*.txt", "*.jinja", "*.model")
_TEMPLATE_FOLDER = "additional_chat_templates"
_SMALL_BYTES = 256 << 20
_TEMPLATE_BYTES = 1 << 20


def read_json(path: Path, *, limit_bytes: int) -> JsonObject:
    """Read a JSON file of a model folder, which must hold one object.

    Raises:
        CheckpointError: the file is missing, a link out of the folder, over `limit_bytes`, not UTF-8, not JSON, not
            an object, or has a key twice.
    """
    path = Path(path)
    check_model_file(path)
    try:
        with open(path, "rb") as file:
            # `read` reserves what it is asked for: the file's size, and not the limit.
            data = file.read(min(os.fstat(file.fileno()).st_size, limit_bytes) + 1)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > limit_bytes:
        raise CheckpointError(f"{path} is larger than {limit_bytes} bytes, the most that is read of such a file")
    return parse_object(data, str(path))


def check_model_file(path: Path, *, limit_bytes: int | None = None, root: Path | None = None) -> None:
    """Raise `CheckpointError` for a path that is missing, not a regular file, too large, or a link out of its folder.

    A link may point to another file of the same folder and, in a Hugging Face cache, to the repository's `blobs`.

    Args:
        limit_bytes: the largest size; None: any.
        root: the model folder, where it is not the file's own.
    """
    try:
        target = path.resolve(strict=True)
        folder = (root or path.parent).resolve(strict=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError before Python 3.13
        raise CheckpointError(f"{path} cannot be read: {clip(str(error))}") from error
    if not target.is_file():
        raise CheckpointError(f"{path} is not a regular file")
    if not any(target.is_relative_to(root) for root in (folder, *_blob_folders(folder))):
        raise CheckpointError(f"{path} is a link to {target}, outside of its model folder; put the file itself there")
    if limit_bytes is not None and target.stat().st_size > limit_bytes:
        raise CheckpointError(f"{path} is larger than {limit_bytes} bytes, the most that is read of such a file")


def check_small_files(folder: Path) -> None:
    """`check_model_file` for every file of `folder` that a library reads by itself: tokenizer, templates, configs."""
    for file in small_files(folder):
        check_model_file(file, limit_bytes=_TEMPLATE_BYTES if file.suffix == ".jinja" else _SMALL_BYTES, root=folder)


def small_files(folder: Path) -> Iterator[Path]:
    """The files beside the weights, and the templates in the subfolder where transformers looks for them."""
    for pattern in (*SMALL_FILES, f"{_TEMPLATE_FOLDER}/*.jinja"):
        yield from sorted(file for file in folder.glob(pattern) if not file.is_dir())


def _blob_folders(folder: Path) -> list[Path]:
    """Return the folders in which a hub cache stores the files of the (resolved) snapshot `folder`; else none.

    The layout is <cache>/models--org--name/{snapshots/<commit>, blobs}; huggingface_hub 2 may share blobs between
    repositories in <cache>/blobs, which it marks as its own.
    """
    snapshot = folder.parent if folder.parent.parent.name == "snapshots" else folder  # of a part in its own subfolder
    repository = snapshot.parent.parent
    if snapshot.parent.name != "snapshots" or not repository.name.startswith("models--"):
        return []
    shared = repository.parent / "blobs"
    is_shared_store = os.path.isfile(shared / ".huggingface-shared-blobs")
    return [repository / "blobs", *([shared] if is_shared_store else [])]


def parse_object(data: bytes, what: str) -> JsonObject:
    """The JSON object in `data`; `what` names it in errors. Raises `CheckpointError`."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique_keys)
    except RecursionError as error:
        raise CheckpointError(f"{what} is not usable: its JSON is nested too deeply") from error
    except ValueError as error:
        raise CheckpointError(f"{what} is not usable: {clip(str(error))}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} must hold a JSON object, not a {type(value).__name__}")
    return value


def _unique_keys(pairs: list[tuple[str, object]]) -> JsonObject:
    """Build an object. A duplicate key is an error, because readers disagree on which of the two counts."""
    result: JsonObject = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {quote(key)} comes twice")
        result[key] = value
    return result
