"""A model folder's weights: its safetensors files, their headers, and memory-mapped tensors.

A folder is opened strictly (safetensors only, complete, consistent). The safetensors library checks the layout of each
file (lengths, offsets, overlaps, holes, shapes); this module checks the rest. Which parameter a tensor fills is
`loader.py`'s; checking untrusted files is `model_files.py`'s.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError, safe_open

from llm.base.text import clip, list_names, quote
from llm.base.types import JsonObject
from llm.errors import CheckpointError
from llm.loading.model_files import check_model_file, parse_object, read_json

HEADER_LIMIT_BYTES = 100_000_000
INDEX_LIMIT_BYTES = 100_000_000

# The dtype names of the safetensors format. F4 and F6 pack several values into a byte; no layer reads them, so they are
# refused.
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
    """One tensor as its file's header describes it."""

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
        tensors: every tensor by name, in file order (by shard, then by offset).
        total_bytes: the size of all tensors.

    A tensor is a view into a private, copy-on-write mapping of its file. It takes no memory of the process until it is
    written to, and keeps the mapping alive. If another process truncates a mapped file, SIGBUS kills this process;
    Python cannot turn that into an exception.
    """

    def __init__(self, folder: Path, tensors: dict[str, TensorInfo]):
        self.folder = folder
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(tensors)
        self.total_bytes = sum(info.nbytes for info in tensors.values())
        self._maps: dict[Path, safe_open] = {}
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

    @classmethod
    def of_file(cls, file: Path) -> Checkpoint:
        """The tensors of one file of a folder; no tensor data is read. Raises `CheckpointError` if it is malformed."""
        return cls(file.parent, _read_headers([file]))

    def load(self, name: str) -> torch.Tensor:
        """Return the tensor as a view into the mapping of its file (a copy if it is misaligned there)."""
        if self._closed:
            raise CheckpointError(f"the checkpoint {self.folder} is closed; open it again to load tensors")
        if name not in self.tensors:
            raise CheckpointError(f"{self.folder} has no tensor {quote(name)}")
        file = self.tensors[name].file
        try:
            tensor = self._map(file).get_tensor(name)
        except (SafetensorError, OSError, RuntimeError, TypeError) as error:
            raise CheckpointError(f"{file} could not be read: {clip(str(error))}") from error
        return tensor if tensor.data_ptr() % tensor.dtype.itemsize == 0 else tensor.clone()

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor in file order. The mapping of a file is released before the next file is opened."""
        for file, infos in _by_file(self.tensors.values()).items():
            try:
                for info in infos:
                    yield info.name, self.load(info.name)
            finally:
                self._maps.pop(file, None)

    def parts(self, names: Sequence[Sequence[str]]) -> CheckpointParts:
        """These tensors alone, in this order."""
        return CheckpointParts(self, names)

    def close(self) -> None:
        """Release all mappings. Loaded tensors stay valid and keep theirs."""
        self._closed = True
        self._maps.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _map(self, file: Path) -> safe_open:
        if file not in self._maps:
            self._maps[file] = safe_open(file, framework="pt", device="cpu")
        return self._maps[file]


class CheckpointParts:
    """Some tensors of a checkpoint, part by part. Each part maps its files anew, so that the pages which it has read
    leave the process with it."""

    def __init__(self, checkpoint: Checkpoint, parts: Sequence[Sequence[str]]) -> None:
        self._folder = checkpoint.folder
        self._parts = [{name: checkpoint.tensors[name] for name in names} for names in parts]
        self.tensors: Mapping[str, TensorInfo] = {name: info for part in self._parts for name, info in part.items()}
        self.total_bytes = sum(info.nbytes for info in self.tensors.values())

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor."""
        for part in self._parts:
            with Checkpoint(self._folder, part) as opened:
                for name in part:
                    yield name, opened.load(name)


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
    """Return the index's tensor name -> shard; every shard is a plain file name inside the folder."""
    weight_map = read_json(index, limit_bytes=INDEX_LIMIT_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no 'weight_map' that names a file for each tensor")
    for file_name in weight_map.values():
        if not _is_plain_name(file_name):
            raise CheckpointError(
                f"{index} names the file {quote(file_name)}; only plain *.safetensors names in its folder are allowed"
            )
    return weight_map


def _is_plain_name(name: object) -> bool:
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
    """The error message for a folder without safetensors, with the way to convert it if there is one."""
    refused = [file.name for file in _list_files(folder) if file.suffix in _REFUSED_SUFFIXES]
    if not refused:
        return f"{folder} holds no weights: there is no *.safetensors file in it"
    gguf = [name for name in refused if name.endswith(".gguf")]
    if gguf:
        return f"{folder} holds no *.safetensors file, only {list_names(refused)}; pass the path of a GGUF file itself"
    return (
        f"{folder} holds no *.safetensors file, only {list_names(refused)}, which this engine never opens (such files "
        "can run code when they are read); convert them once, elsewhere, with transformers: "
        f"AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
    )


def _list_files(folder: Path) -> list[Path]:
    """Return the folder's entries by name, except hidden ones (file managers leave `._*.safetensors`)."""
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
                raise CheckpointError(f"{file.parent} has the tensor {quote(info.name)} twice: in {both}")
            tensors[info.name] = info
    return tensors


def _read_header(file: Path) -> list[TensorInfo]:
    """Return the file's tensors in the order of their bytes."""
    _validate_layout(file)
    entries = parse_object(_header_bytes(file), f"the header of {file}")
    entries.pop("__metadata__", None)
    by_offset = sorted(entries.items(), key=lambda item: item[1]["data_offsets"])
    return [_tensor_info(file, name, entry) for name, entry in by_offset]


def _validate_layout(file: Path) -> None:
    """Let the safetensors library check the header against its schema and the file's size."""
    check_model_file(file)
    try:
        with safe_open(file, framework="pt", device="cpu"):
            pass
    except SafetensorError as error:
        raise CheckpointError(f"{file} is not a valid safetensors file{_why_invalid(file, error)}") from error
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{file} cannot be mapped into memory: {clip(str(error))}") from error


def _why_invalid(file: Path, error: SafetensorError) -> str:
    with open(file, "rb") as opened:
        if opened.read(20).startswith(b"version https://git-"):
            return " but a git-lfs pointer to one; run `git lfs pull` in its folder"
    return f" ({clip(str(error))}); if it was downloaded or copied, do that again"


def _header_bytes(file: Path) -> bytes:
    with open(file, "rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        if length > HEADER_LIMIT_BYTES:
            raise CheckpointError(f"the header of {file} has {length} bytes; at most {HEADER_LIMIT_BYTES} are read")
        return opened.read(length)


def _tensor_info(file: Path, name: str, entry: JsonObject) -> TensorInfo:
    dtype, shape = DTYPES.get(entry["dtype"]), tuple(entry["shape"])
    if dtype is None:
        raise CheckpointError(
            f"{file} stores {quote(name)} as {clip(entry['dtype'])}, which is not supported; "
            f"supported are {', '.join(DTYPES)}"
        )
    # The library's overflow check misses shapes with a zero.
    if math.prod(size or 1 for size in shape) * dtype.itemsize >= 2**63:
        raise CheckpointError(f"{file} gives {quote(name)} the shape {clip(str(shape))}, too large to address")
    return TensorInfo(name, dtype, shape, file)


def _by_file(infos: Iterable[TensorInfo]) -> dict[Path, list[TensorInfo]]:
    files: dict[Path, list[TensorInfo]] = {}
    for info in infos:
        files.setdefault(info.file, []).append(info)
    return files
