"""Writes a GGUF file, version 3: the inverse of `container.py`.

Owns the layout of the header and the places of the tensors, whose bytes the caller makes one after the other.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch

from llm.kernels.reference.gguf_blocks import BLOCKS, type_number
from llm.loading.gguf.container import Value

_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
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
