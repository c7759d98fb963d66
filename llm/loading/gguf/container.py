"""The GGUF container, versions 2 and 3: header, metadata and tensor descriptions, read strictly.

The layout is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Everything a file claims is checked:
each count, length, offset and alignment is compared with the bytes that are there before memory is taken for it. What
the metadata means is `metadata.py`'s, what a tensor's bits mean `llm.kernels.reference.gguf_blocks`'s.

`Keys` reads an architecture's metadata with types, `write_gguf` is the inverse of the reader. Both are our own: the
reader is held to limits against hostile files, and the writer streams tensors that a loaded model makes one by one.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch

from llm.base.text import quote, show
from llm.errors import CheckpointError
from llm.kernels.reference.gguf_blocks import BLOCKS, type_name, type_number
from llm.loading.model_files import check_model_file

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_DIMENSIONS = 4
_MOST_METADATA_BYTES = 1 << 28
_MOST_KEYS = 1 << 16
_MOST_NAME_BYTES = 1 << 16
_MOST_ALIGNMENT = 1 << 20
_MOST_TENSORS = 1 << 20
# Python takes far more memory for a string than a file does: at most so many values are read of one file.
_MOST_VALUES = 1 << 23
_STRING, _ARRAY = 8, 9
# Value type -> struct format. 7 is a bool in one byte.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# An array or a number, a string, a bool. Arrays are read whole, never nested.
Value = int | float | bool | str | list[str] | np.ndarray


@dataclass(frozen=True)
class GgufTensor:
    """One tensor as a file describes it.

    Attributes:
        type: of its blocks, a name of `BLOCKS`.
        shape: rows first, as in PyTorch; the file has it in reverse.
        start: of its bytes, from the beginning of the file.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    file: Path
    start: int

    @property
    def row_bytes(self) -> int:
        block = BLOCKS[self.type]
        return self.shape[-1] // block.values * block.bytes

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True)
class GgufFile:
    """The header of one file."""

    path: Path
    metadata: dict[str, Value]
    tensors: tuple[GgufTensor, ...]


def read_header(path: Path) -> GgufFile:
    """Read a file's header; no tensor data is read. Raises `CheckpointError` for a file that is not whole and sound."""
    check_model_file(path)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24 or file.read(4) != _MAGIC:
                raise CheckpointError(f"{path} is not a GGUF file{_why(path, size)}.")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
                return _Reader(path, memory).header()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error


def _why(path: Path, size: int) -> str:
    with open(path, "rb") as file:
        if file.read(20).startswith(b"version https://git-"):
            return " but a git-lfs pointer to one; run `git lfs pull` in its folder"
    return f": it has {size} bytes" if size < 24 else ": it does not begin with 'GGUF'"


class _Reader:
    """A position in the header, which every read moves."""

    def __init__(self, path: Path, memory: mmap.mmap) -> None:
        self._path = path
        self._memory = memory
        self._size = len(memory)
        self._at = 4
        self._values_left = _MOST_VALUES

    def header(self) -> GgufFile:
        version = self._number("I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            what = "is big-endian" if swapped in _VERSIONS else f"has version {version}"
            raise self._error(f"{what}; versions 2 and 3 in little-endian order are read")
        tensor_count, key_count = self._number("Q"), self._number("Q")
        # A description takes 24 bytes or more, a key with its value 13.
        most_tensors, most_keys = min(_MOST_TENSORS, self._size // 24), min(_MOST_KEYS, self._size // 13)
        if tensor_count > most_tensors:
            raise self._error(f"claims {tensor_count} tensors, where at most {most_tensors} are possible")
        if key_count > most_keys:
            raise self._error(f"claims {key_count} metadata keys, where at most {most_keys} are possible")
        metadata = self._metadata(key_count)
        described = [self._description() for _ in range(tensor_count)]
        return GgufFile(self._path, metadata, self._placed(described, self._alignment(metadata)))

    def _metadata(self, count: int) -> dict[str, Value]:
        metadata: dict[str, Value] = {}
        for _ in range(count):
            key = self._string(_MOST_NAME_BYTES)
            if key in metadata:
                raise self._error(f"has the metadata key {quote(key)} twice")
            metadata[key] = self._value(key, self._number("I"))
            if self._at > _MOST_METADATA_BYTES:
                raise self._error(f"has more than {_MOST_METADATA_BYTES} bytes of metadata")
        return metadata

    def _value(self, key: str, kind: int) -> Value:
        if kind == _STRING:
            return self._string(self._size)
        if kind == _ARRAY:
            return self._array(key)
        return self._number(self._format(key, kind))

    def _array(self, key: str) -> Value:
        kind, count = self._number("I"), self._number("Q")
        if kind == _ARRAY:
            raise self._error(f"nests arrays in {quote(key)}, which no known key does")
        least = 8 if kind == _STRING else struct.calcsize(self._format(key, kind))
        if count > (self._size - self._at) // least or count > self._values_left:
            raise self._error(f"claims {count} values in {quote(key)}")
        self._values_left -= count
        if kind == _STRING:
            return [self._string(_MOST_NAME_BYTES) for _ in range(count)]
        return np.frombuffer(self._bytes(count * least), dtype=np.dtype(self._format(key, kind)).newbyteorder("<"))

    def _format(self, key: str, kind: int) -> str:
        if kind not in _SCALARS:
            raise self._error(f"has a value of the unknown type {kind} in {quote(key)}")
        return _SCALARS[kind]

    def _description(self) -> tuple[str, str, tuple[int, ...], int]:
        """(name, type, shape, offset) of one tensor."""
        name, dimensions = self._string(_MOST_NAME_BYTES), self._number("I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise self._error(f"gives {quote(name)} {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        kind, offset = self._number("I"), self._number("Q")
        known = type_name(kind)
        if known not in BLOCKS:
            raise self._error(
                f"stores {quote(name)} as {known}, which is not computed; use a file of another type, such as Q4_K_M "
                f"or Q8_0 (computed are {', '.join(BLOCKS)})"
            )
        values = BLOCKS[known].values
        if math.prod(shape) >= 2**63 or not all(shape) or shape[-1] % values:
            what = f"the shape {list(shape)}; sizes are positive, and columns a multiple of {values}"
            raise self._error(f"gives {quote(name)} {what}")
        return name, known, shape, offset

    def _alignment(self, metadata: dict[str, Value]) -> int:
        alignment = metadata.get("general.alignment", 32)
        is_sound = type(alignment) is int and 0 < alignment <= _MOST_ALIGNMENT and not alignment & (alignment - 1)
        if not is_sound or not isinstance(alignment, int):
            raise self._error("has a general.alignment that is no power of two")
        return alignment

    def _placed(self, described: list[tuple[str, str, tuple[int, ...], int]], alignment: int) -> tuple[GgufTensor, ...]:
        """The tensors in the order of their bytes, which lie behind the header, within the file, and never overlap."""
        data = -(-self._at // alignment) * alignment
        placed = sorted(
            (GgufTensor(name, kind, shape, self._path, data + offset) for name, kind, shape, offset in described),
            key=lambda tensor: tensor.start,
        )
        end = data
        for tensor in placed:
            if (tensor.start - data) % alignment or tensor.start < end:
                raise self._error(f"places {quote(tensor.name)} where it overlaps another tensor or is not aligned")
            end = tensor.start + tensor.nbytes
            if end > self._size:
                raise self._error(
                    f"ends before its tensor {quote(tensor.name)} does; if it was downloaded or copied, do that again"
                )
        if len({tensor.name for tensor in placed}) < len(placed):
            counts = Counter(tensor.name for tensor in placed)
            raise self._error(f"has {quote(counts.most_common(1)[0][0])} more than once")
        return tuple(placed)

    def _string(self, limit: int) -> str:
        length = self._number("Q")
        if length > limit:
            raise self._error(f"has a string of {length} bytes in its header, where at most {limit} are allowed")
        data = self._bytes(length)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._error("has a string in its header that is not UTF-8") from error

    def _number(self, kind: str) -> int:
        (value,) = struct.unpack(f"<{kind}", self._bytes(struct.calcsize(f"<{kind}")))
        return value

    def _bytes(self, count: int) -> bytes:
        if count > self._size - self._at:
            raise self._error("ends inside its header; if it was downloaded or copied, do that again")
        self._at += count
        return self._memory[self._at - count : self._at]

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path} {what}.")


_MOST_LISTED = 1 << 14


class Metadata:
    """The keys of one architecture, typed; raises `CheckpointError` for a value of another type."""

    def __init__(self, metadata: Mapping[str, Value]) -> None:
        self.all = metadata
        self.architecture = metadata.get("general.architecture")

    def get(self, key: str) -> Value | None:
        return self.all.get(f"{self.architecture}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        """A number, or a list of one number for every layer."""
        value = self.get(key)
        if isinstance(value, np.ndarray) and 0 < value.size <= _MOST_LISTED and (value == value[0]).all():
            value = value[0].item()
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, value, "an integer, the same for all layers")
        return value

    def of_layers(self, key: str) -> list[int]:
        """A list of one number for every layer; of a number, that many times."""
        value, count = self.get(key), self.integer("block_count")
        if not 0 < count <= _MOST_LISTED:
            raise self.error("block_count", count, f"an integer from 1 to {_MOST_LISTED}")
        if isinstance(value, np.ndarray) and value.dtype.kind in "iub" and value.size == count:
            return [int(each) for each in value]
        return [self.integer(key)] * count

    def boolean(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, value, "a number")
        # A float32 of a decimal number: 1e-05 rather than 9.999999747378752e-06, as config.json has it.
        return float(str(np.float32(value))) if isinstance(value, float) else float(value)

    def error(self, key: str, value: object, right: str) -> CheckpointError:
        shown = "an array" if isinstance(value, np.ndarray | list) else show(value)
        return CheckpointError(f"GGUF metadata: {self.architecture}.{key} is {shown}, must be {right}.")


# --- Writing. ---

_ALIGNMENT = 32
_ARRAYS = {np.dtype(np.int32): 5, np.dtype(np.float32): 6}


class Planned(NamedTuple):
    """A tensor before its bytes are made; `type` is a name of `BLOCKS`, `shape` has rows first."""

    name: str
    type: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        block = BLOCKS[self.type]
        return math.prod(self.shape) // block.values * block.bytes


def write_gguf(
    path: Path, metadata: Mapping[str, Value], planned: Sequence[Planned], tensors: Iterable[torch.Tensor]
) -> None:
    """Write the file; `tensors` are those of `planned`, in their order, each of so many bytes.

    Integers are stored as uint32, numbers as float32; arrays are int32 or float32. Raises RuntimeError for a tensor of
    another size.
    """
    with open(path, "wb") as file:
        file.write(_header(metadata, planned))
        _pad(file)
        for plan, tensor in zip(planned, tensors, strict=True):
            data = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
            if data.nbytes != plan.nbytes:
                raise RuntimeError(f"{plan.name} has {data.nbytes} bytes, {plan.nbytes} were promised")
            file.write(data.data)
            _pad(file)


def _header(metadata: Mapping[str, Value], planned: Sequence[Planned]) -> bytes:
    parts = [struct.pack("<4sIQQ", b"GGUF", 3, len(planned), len(metadata))]
    for key, value in metadata.items():
        parts += [_text(key), _value(value)]
    offset = 0
    for plan in planned:
        shape = plan.shape[::-1]
        place = struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, type_number(plan.type), offset)
        parts += [_text(plan.name), place]
        offset += -(-plan.nbytes // _ALIGNMENT) * _ALIGNMENT
    return b"".join(parts)


def _value(value: Value) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, np.ndarray):
        return struct.pack("<IIQ", _ARRAY, _ARRAYS[value.dtype], len(value)) + value.tobytes()
    return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_text, value))


def _text(value: str) -> bytes:
    data = value.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % _ALIGNMENT))
