"""The blocks of GGUF tensors in C++, while a model is loaded; `kernels/reference/gguf_blocks.py` defines them."""

from __future__ import annotations

import torch

from llm.base.library_settings import num_threads
from llm.kernels.cpu.library import Library, pointer
from llm.kernels.cpu.signatures import KERNELS
from llm.kernels.reference.gguf_blocks import BLOCKS, NOT_FINITE, TYPES

_DECODE = KERNELS["llm_decode_blocks"]


def decode_blocks(
    lib: Library,
    raw: torch.Tensor,
    kind: str,
    q: torch.Tensor,
    scale: torch.Tensor,
    minimum: torch.Tensor | None,
    least: int,
    looks_up: bool = False,
) -> None:
    """As the definition."""
    block, (rows, columns) = BLOCKS[kind], q.shape
    groups = scale.shape[1]
    size = columns // max(1, groups)
    _check("raw", raw, torch.uint8, rows, columns // block.values * block.bytes)
    _check("q", q, torch.int8, rows, columns)
    _check("scale", scale, torch.float32, rows, groups)
    if minimum is not None:
        _check("minimum", minimum, torch.float32, rows, groups)
    if (
        columns % block.values
        or size * groups != columns
        or block.group % size
        or (block.has_minimum and minimum is None)
    ):
        raise ValueError(f"{columns} columns in groups of {size} are no form of {kind}")
    table = torch.tensor(block.table, dtype=torch.int8) if looks_up and block.table else None
    places = (raw.data_ptr(), q.data_ptr(), scale.data_ptr(), pointer(minimum), pointer(table))
    if lib.call(_DECODE, TYPES.index(kind), *places, rows, columns, size, least, num_threads()):
        raise ValueError(NOT_FINITE)


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, rows: int, columns: int) -> None:
    if tensor.dtype != dtype or tensor.shape != (rows, columns) or not tensor.is_contiguous():
        raise ValueError(f"{name} is contiguous {dtype} {[rows, columns]}, got {tensor.dtype} {list(tensor.shape)}")
