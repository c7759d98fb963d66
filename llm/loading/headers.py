"""A hub model without its weights, for `LLM.plan`: the headers of their files by range requests, no tensor's bytes.

Owns the folder that stands in for such a model: its small files, and weight files of the right size that hold their
header and a hole. Who reads it reads a model folder, with all its checks.
"""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from llm.base.text import quote
from llm.errors import CheckpointError
from llm.loading.checkpoint import HEADER_LIMIT_BYTES, find_index, read_weight_map
from llm.loading.gguf.container import read_header
from llm.loading.gguf.resolve import choose_on_hub, find_cached, hub_name_of
from llm.loading.resolve import cached_folder, explain, hub_files, is_hub_name, resolve_folder, weight_files
from llm.loading.sentence_transformers import read_sentence_modules

# Of a safetensors file at first: most headers are shorter. Of a GGUF file, whose header holds the vocabulary.
_FIRST_BYTES, _FIRST_GGUF_BYTES = 1 << 17, 8 << 20
_MOST_GGUF_BYTES = 1 << 28
_REQUESTS_AT_ONCE = 8


@contextmanager
def without_weights(model: str | Path, revision: str | None, check: Callable[[Path], None]) -> Iterator[str | Path]:
    """`model` itself where it is local or in the cache, else a folder or file that stands in for it until the end.

    Args:
        check: called with a folder of the model's small files before headers are fetched; may raise.

    Raises:
        CheckpointError: the hub does not give it, or it has no weights that are read here.
    """
    name = hub_name_of(model) if isinstance(model, str) and not _exists(model) else ""
    if not name or _is_cached(str(model), revision):
        yield model
        return
    files = hub_files(name, revision)
    gguf = choose_on_hub(str(model), files)
    with tempfile.TemporaryDirectory(prefix="llm-plan-") as made:
        folder = Path(made)
        if gguf is not None:
            for part in gguf.parts:
                path = folder / Path(part).name
                if part not in files:
                    raise CheckpointError(f"the hub model {name!r} lacks the part {quote(part)} of a split model.")
                _fetch_gguf(name, revision, part, files[part], path)
            yield folder / Path(gguf.file).name
            return
        small = resolve_folder(name, revision, weights=False)
        weights = weight_files(name, files)
        check(small)
        read_sentence_modules(small, name, revision)  # which fetches their own folders
        shutil.copytree(small, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
        for module in small.glob("*/*.safetensors"):
            shutil.copyfile(module, folder / module.relative_to(small))
        with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
            list(
                pool.map(
                    lambda file: _fetch_safetensors(name, revision, file, files[file], folder / file),
                    _needed(folder, weights),
                )
            )
        yield folder


def _exists(model: str) -> bool:
    """A path, or a folder and a type of the files in it."""
    path = os.path.expanduser(model)
    return os.path.exists(path) or os.path.exists(path.rpartition(":")[0])


def _is_cached(model: str, revision: str | None) -> bool:
    if is_hub_name(model) and cached_folder(model, revision) is not None:
        return True
    return find_cached(model, revision) is not None


def _needed(folder: Path, weights: list[str]) -> list[str]:
    """The files that `Checkpoint` opens."""
    index = find_index(folder)
    if index is not None:
        return [file for file in sorted(set(read_weight_map(index).values())) if file in weights]
    return ["model.safetensors"] if "model.safetensors" in weights else weights


def _fetch_safetensors(name: str, revision: str | None, file: str, size: int, path: Path) -> None:
    head = read_range(name, revision, file, 0, min(size, _FIRST_BYTES))
    length = struct.unpack("<Q", head[:8])[0] if len(head) >= 8 else 0
    if length > HEADER_LIMIT_BYTES:
        raise CheckpointError(f"the header of {file} has {length} bytes; at most {HEADER_LIMIT_BYTES} are read")
    if 8 + length > len(head):
        head += read_range(name, revision, file, len(head), min(size, 8 + length))
    _write(path, head[: 8 + length], size)


def _fetch_gguf(name: str, revision: str | None, file: str, size: int, path: Path) -> None:
    """As much of the file as its header takes, which only reading it tells."""
    head = b""
    while True:
        most = min(size, max(_FIRST_GGUF_BYTES, 4 * len(head)))
        head += read_range(name, revision, file, len(head), most)
        if most == size or most >= _MOST_GGUF_BYTES or _has_header(path, head):
            break
    _write(path, head, size)


def _has_header(path: Path, head: bytes) -> bool:
    """True if the header ends within these bytes: then a tensor is what is missing, or something else is wrong."""
    _write(path, head, len(head))
    try:
        read_header(path)
    except CheckpointError as error:
        return "ends inside its header" not in str(error) and " claims " not in str(error)
    return True


def _write(path: Path, head: bytes, size: int) -> None:
    with open(path, "wb") as file:
        file.write(head)
        file.truncate(size)


def read_range(name: str, revision: str | None, file: str, start: int, end: int) -> bytes:
    """Bytes start to end - 1 of a file on the hub; raises `CheckpointError`, also for a hub that sends whole files."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    if start >= end:
        return b""
    headers = {**build_hf_headers(), "Range": f"bytes={start}-{end - 1}"}
    try:
        with get_session().stream("GET", hf_hub_url(name, file, revision=revision), headers=headers) as response:
            hf_raise_for_status(response)
            if response.status_code != 206:
                raise CheckpointError(
                    f"the hub sends no part of {file!r} alone; download the model first, then plan it"
                )
            data: bytes = response.read()
    except CheckpointError:
        raise
    # The exceptions of the transport below huggingface_hub (requests, httpx, ...) change with its version.
    except Exception as error:
        raise CheckpointError(explain(name, revision, error)) from error
    if len(data) != end - start:
        raise CheckpointError(f"the hub sent {len(data)} bytes of {file!r} in the place of {end - start}; try again")
    return data
