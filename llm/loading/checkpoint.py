"""A model folder's weights: which safetensors files belong to it, what they hold, and views of the tensors.

Owns opening a folder strictly (safetensors only, nothing missing, nothing contradictory) and the safe reading of the
JSON files beside the weights. Does not own which model parameter a tensor fills; that is `loader.py`. The safetensors
library checks each file's layout (lengths, offsets, overlaps, holes, shapes); this file adds what it leaves open.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from llm.base.errors import CheckpointError

HEADER_LIMIT_BYTES = 100_000_000
INDEX_LIMIT_BYTES = 100_000_000

# The safetensors format's names. F4 and F6 pack several values into a byte and are refused until a layer reads them.
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "BOOL": torch.bool,
        "U8": torch.uint8,
        "U16": torch.uint16,
        "U32": torch.uint32,
        "U64": torch.uint64,
        "I8": torch.int8,
        "I16": torch.int16,
        "I32": torch.int32,
        "I64": torch.int64,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
        "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
        "F8_E8M0": torch.float8_e8m0fnu,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F32": torch.float32,
        "F64": torch.float64,
        "C64": torch.complex64,
    }
)

_REFUSED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".gguf")


@dataclass(frozen=True)
class TensorInfo:
    """What a file's header says of one tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Checkpoint:
    """The weights of one model folder, memory-mapped.

    Attributes:
        tensors: every tensor by name, in file order (shards in order, then offset in the shard).
        total_bytes: the size of all tensors.

    A tensor is a view into a private, copy-on-write map of its file: it costs no memory of the process until it is
    written to, and keeps its file's map alive for as long as it lives. A file that is truncated by another process
    while it is mapped kills the process with SIGBUS; nothing in Python can turn that into an exception.
    """

    def __init__(self, folder: Path, tensors: dict[str, TensorInfo]):
        self.folder = folder
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(tensors)
        self.total_bytes = sum(info.nbytes for info in tensors.values())
        self._maps: dict[Path, Any] = {}
        self._closed = False

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read the headers of the folder's weight files; no tensor data is read.

        Raises:
            CheckpointError: no weights, weights in another format, a missing shard, a malformed file, or an index
                and shards that disagree.
        """
        folder = Path(folder)
        index = find_index(folder)
        if index is None:
            return cls(folder, _read_headers(_files_without_index(folder)))
        weight_map = read_weight_map(index)
        tensors = _read_headers(_shards(index, weight_map))
        _check_index_agrees(index, weight_map, tensors)
        return cls(folder, tensors)

    def load(self, name: str) -> torch.Tensor:
        """Return the tensor as a view into its file's map (a copy only where the file stores it misaligned)."""
        if self._closed:
            raise CheckpointError(f"the checkpoint {self.folder} is closed; open it again to load tensors")
        if name not in self.tensors:
            raise CheckpointError(f"{self.folder} has no tensor {_quote(name)}")
        file = self.tensors[name].file
        try:
            tensor = self._map(file).get_tensor(name)
        except (SafetensorError, OSError, RuntimeError, TypeError) as error:
            raise CheckpointError(f"{file} could not be read: {_clip(str(error))}") from error
        return tensor if tensor.data_ptr() % tensor.dtype.itemsize == 0 else tensor.clone()

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor in file order; the map of a file is let go before the next file is opened."""
        for file, infos in _by_file(self.tensors.values()).items():
            try:
                for info in infos:
                    yield info.name, self.load(info.name)
            finally:
                self._maps.pop(file, None)

    def close(self) -> None:
        """Let go of all maps; tensors already loaded stay valid and keep theirs."""
        self._closed = True
        self._maps.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _map(self, file: Path) -> Any:
        if file not in self._maps:
            self._maps[file] = safe_open(file, framework="pt", device="cpu")
        return self._maps[file]


# Which files


def find_index(folder: Path) -> Path | None:
    """Return the folder's `*.safetensors.index.json`, or None when it has none."""
    indexes = [file for file in _list_files(folder) if file.name.endswith(".safetensors.index.json")]
    standard = folder / "model.safetensors.index.json"
    if standard in indexes:
        return standard
    if len(indexes) > 1:
        names = list_names(file.name for file in indexes)
        raise CheckpointError(f"{folder} has several index files ({names}) and none is model.safetensors.index.json")
    return indexes[0] if indexes else None


def read_weight_map(index: Path) -> dict[str, str]:
    """Return the index's tensor name -> shard file name; every file name is a plain one inside the folder."""
    weight_map = read_json(index, limit_bytes=INDEX_LIMIT_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no 'weight_map' that names a file for each tensor")
    for file_name in weight_map.values():
        if not _is_plain_name(file_name):
            raise CheckpointError(
                f"{index} names the file {_quote(file_name)}; only plain *.safetensors names in its folder are allowed"
            )
    return weight_map


def _is_plain_name(name: Any) -> bool:
    return isinstance(name, str) and name.endswith(".safetensors") and not any(c in name for c in "/\\\0")


def _shards(index: Path, weight_map: dict[str, str]) -> list[Path]:
    shards = [index.parent / name for name in sorted(set(weight_map.values()))]
    missing = [shard.name for shard in shards if not os.path.exists(shard)]
    if missing:
        raise CheckpointError(f"{index} needs files that are missing: {list_names(missing)}; download the model again")
    return shards


def _files_without_index(folder: Path) -> list[Path]:
    files = [file for file in _list_files(folder) if file.suffix == ".safetensors"]
    standard = folder / "model.safetensors"
    if standard in files:
        return [standard]
    if not files:
        raise CheckpointError(_no_weights(folder))
    return files


def _no_weights(folder: Path) -> str:
    """The sentence for a folder without safetensors, with the way out where there is one."""
    refused = [file.name for file in _list_files(folder) if file.suffix in _REFUSED_SUFFIXES]
    if not refused:
        return f"{folder} holds no weights: there is no *.safetensors file in it"
    gguf = [name for name in refused if name.endswith(".gguf")]
    option = f", gguf_file={gguf[0]!r}" if len(gguf) == len(refused) else ""
    return (
        f"{folder} holds no *.safetensors file, only {list_names(refused)}, which this engine never opens (such files "
        "can run code when they are read); convert them once, elsewhere, with transformers: "
        f"AutoModelForCausalLM.from_pretrained(folder{option}).save_pretrained(new_folder)"
    )


def _list_files(folder: Path) -> list[Path]:
    """Return the folder's entries by name, without hidden ones (file managers leave `._*.safetensors` behind)."""
    try:
        return sorted(file for file in folder.iterdir() if not file.name.startswith("."))
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read as a model folder: {error.strerror}") from error


def _check_index_agrees(index: Path, weight_map: dict[str, str], tensors: dict[str, TensorInfo]) -> None:
    held = {name: info.file.name for name, info in tensors.items()}
    lacking = [name for name, file_name in weight_map.items() if held.get(name) != file_name]
    if lacking:
        raise CheckpointError(f"{index} promises tensors that their shards lack: {list_names(lacking)}")
    extra = [name for name in held if name not in weight_map]
    if extra:
        raise CheckpointError(f"the shards of {index} hold tensors that it does not list: {list_names(extra)}")


# What a file holds


def _read_headers(files: Iterable[Path]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for info in _read_header(file):
            if info.name in tensors:
                both = f"{tensors[info.name].file.name} and {file.name}"
                raise CheckpointError(f"{file.parent} has the tensor {_quote(info.name)} twice: in {both}")
            tensors[info.name] = info
    return tensors


def _read_header(file: Path) -> list[TensorInfo]:
    """Return the file's tensors in the order of their bytes."""
    _validate_layout(file)
    entries = _parse_object(_header_bytes(file), f"the header of {file}")
    entries.pop("__metadata__", None)
    by_offset = sorted(entries.items(), key=lambda item: item[1]["data_offsets"])
    return [_tensor_info(file, name, entry) for name, entry in by_offset]


def _validate_layout(file: Path) -> None:
    """Have the safetensors library check the header against its schema and the file's size."""
    check_model_file(file)
    try:
        with safe_open(file, framework="pt", device="cpu"):
            pass
    except SafetensorError as error:
        raise CheckpointError(f"{file} is not a valid safetensors file{_why_invalid(file, error)}") from error
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{file} cannot be mapped into memory: {_clip(str(error))}") from error


def _why_invalid(file: Path, error: SafetensorError) -> str:
    with open(file, "rb") as opened:
        if opened.read(20).startswith(b"version https://git-"):
            return " but a git-lfs pointer to one; run `git lfs pull` in its folder"
    return f" ({_clip(str(error))}); if it was downloaded or copied, do that again"


def _header_bytes(file: Path) -> bytes:
    with open(file, "rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        if length > HEADER_LIMIT_BYTES:
            raise CheckpointError(f"the header of {file} has {length} bytes; at most {HEADER_LIMIT_BYTES} are read")
        return opened.read(length)


def _tensor_info(file: Path, name: str, entry: dict[str, Any]) -> TensorInfo:
    dtype, shape = DTYPES.get(entry["dtype"]), tuple(entry["shape"])
    if dtype is None:
        raise CheckpointError(
            f"{file} stores {_quote(name)} as {_clip(entry['dtype'])}, which is not supported; "
            f"supported are {', '.join(DTYPES)}"
        )
    # A zero hides the other sizes from the library's overflow check.
    if math.prod(size or 1 for size in shape) * dtype.itemsize >= 2**63:
        raise CheckpointError(f"{file} gives {_quote(name)} the shape {_clip(str(shape))}, too large to address")
    return TensorInfo(name, dtype, shape, file)


def _by_file(infos: Iterable[TensorInfo]) -> dict[Path, list[TensorInfo]]:
    files: dict[Path, list[TensorInfo]] = {}
    for info in infos:
        files.setdefault(info.file, []).append(info)
    return files


# Files of a model folder that were written by others


def read_json(path: Path, *, limit_bytes: int) -> dict[str, Any]:
    """Read a model folder's JSON file that must hold one object.

    Raises:
        CheckpointError: the file is missing, a link out of the folder, over `limit_bytes`, not UTF-8, not JSON, not
            an object, or has a key twice.
    """
    path = Path(path)
    check_model_file(path)
    try:
        with open(path, "rb") as file:
            data = file.read(limit_bytes + 1)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > limit_bytes:
        raise CheckpointError(f"{path} is larger than {limit_bytes} bytes, the most that is read of such a file")
    return _parse_object(data, str(path))


def check_model_file(path: Path) -> None:
    """Refuse a path that is missing, no regular file, or a link that leads out of the model.

    A link may lead to another file of the same folder; in a Hugging Face cache also to the repository's `blobs`.
    """
    try:
        target = path.resolve(strict=True)
        folder = path.parent.resolve(strict=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError before Python 3.13
        raise CheckpointError(f"{path} cannot be read: {_clip(str(error))}") from error
    if not target.is_file():
        raise CheckpointError(f"{path} is not a regular file")
    if not any(target.is_relative_to(root) for root in (folder, *_blob_folders(folder))):
        raise CheckpointError(f"{path} is a link to {target}, outside of its model folder; put the file itself there")


def _blob_folders(folder: Path) -> list[Path]:
    """Return where a hub cache keeps the files of the snapshot `folder` (resolved); none for another folder.

    The layout is <cache>/models--org--name/{snapshots/<commit>, blobs}; huggingface_hub 2 may share blobs between
    repositories in <cache>/blobs, which it marks as its own.
    """
    repository = folder.parent.parent
    if folder.parent.name != "snapshots" or not repository.name.startswith("models--"):
        return []
    shared = repository.parent / "blobs"
    is_shared_store = os.path.isfile(shared / ".huggingface-shared-blobs")
    return [repository / "blobs", *([shared] if is_shared_store else [])]


def _parse_object(data: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique_keys)
    except RecursionError as error:
        raise CheckpointError(f"{what} is not usable: its JSON is nested too deeply") from error
    except ValueError as error:
        raise CheckpointError(f"{what} is not usable: {_clip(str(error))}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} must hold a JSON object, not a {type(value).__name__}")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object; a key that comes twice is an error, since readers disagree on which of the two counts."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {_quote(key)} comes twice")
        result[key] = value
    return result


# Words for messages


def list_names(names: Iterable[str], limit: int = 8) -> str:
    """Return "'a', 'b' and 5 more (7 in all)": at most `limit` names, each fit for a terminal."""
    names = list(names)
    shown = ", ".join(_quote(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more ({len(names)} in all)"


def _quote(name: Any) -> str:
    return f"'{_clip(str(name), 100)}'"


def _clip(text: str, limit: int = 200) -> str:
    """Make text from a file safe to print: no control characters, not too long."""
    printable = "".join(char if char.isprintable() else "?" for char in text[:limit])
    return printable if len(text) <= limit else f"{printable}..."
