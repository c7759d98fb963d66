"""Sums, products, selection of rows; and kernels with the bits of what a recorded step would leave to PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from llm.kernels.cpu.library import Library
from llm.kernels.cpu.signatures import KERNELS
from llm.kernels.cpu.tensors import as_float32

_aten = torch.ops.aten
_ADD = KERNELS["llm_add"]
_SHIFT = KERNELS["llm_shift"]
_SCALE = KERNELS["llm_scale"]
_MULTIPLY = KERNELS["llm_multiply"]
_COPY_ROWS = KERNELS["llm_copy_rows"]
_PLACE_ROWS = KERNELS["llm_place_rows"]
_SELECT_ROWS = KERNELS["llm_select_rows"]
Allocate = Callable[[torch.Size, torch.dtype], torch.Tensor]


def select_rows(library: Library, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """float32 or int64 [n, w], int64 [m] -> [m, w]; IndexError for an index outside [0, n).

    PyTorch shares such a copy among its OpenMP threads, which then spin beside ours for milliseconds.
    """
    if x.dtype == torch.int64:  # the kernel copies bits: an integer is two floats
        return select_rows(library, x.view(torch.float32), indices).view(torch.int64)
    x, indices = as_float32(x), indices.contiguous()
    out = library.empty(len(indices), x.shape[1])
    arguments = x.data_ptr(), len(x), indices.data_ptr(), out.data_ptr(), len(indices), x.shape[1]
    if library.call(_SELECT_ROWS, *arguments):
        raise IndexError(f"rows must be in [0, {len(x)}), got {int(indices.min())} to {int(indices.max())}")
    if library.recorder is not None:
        library.recorder.kept.append(x)
    return out


def multiply(library: Library, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """float32 [n, w] twice -> float32 [n, w]; rows may have any stride."""
    if x.shape != y.shape or x.dim() != 2:
        raise ValueError(f"a product takes two matrices of one shape, got {list(x.shape)} and {list(y.shape)}")
    x, y = (item if item.stride(1) == 1 else item.contiguous() for item in (x.float(), y.float()))
    rows, width = x.shape
    out = library.empty(rows, width)
    strided = x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0)
    library.call(_MULTIPLY, *strided, out.data_ptr(), rows, width, torch.get_num_threads())
    return out


def add(library: Library, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """float32 [n, w] twice -> float32 [n, w]; rows may have any stride."""
    if x.shape != y.shape or x.dim() != 2:
        raise ValueError(f"a sum takes two matrices of one shape, got {list(x.shape)} and {list(y.shape)}")
    x, y = x.float().contiguous(), y.float().contiguous()
    out = library.empty_like(x)
    library.call(_ADD, x.data_ptr(), y.data_ptr(), out.data_ptr(), x.numel(), torch.get_num_threads())
    return out


def substitute(library: Library, func: Any, args: Any, kwargs: Any, allocate: Allocate) -> torch.Tensor | None:
    """The result of `func(*args, **kwargs)`, in memory from `allocate(shape, dtype)`; None if there is no kernel."""
    handler = _HANDLERS.get(func)
    return None if handler is None or kwargs else handler(library, args, allocate)


def _add(library: Library, args: Any, allocate: Allocate) -> torch.Tensor | None:
    x, y = args
    if _is_dense(x, torch.float32) and _is_dense(y, torch.float32) and x.shape == y.shape:
        out = allocate(x.shape, x.dtype)
        library.call(_ADD, x.data_ptr(), y.data_ptr(), out.data_ptr(), x.numel(), torch.get_num_threads())
        return out
    if _is_dense(x, torch.int64) and type(y) is int:
        out = allocate(x.shape, x.dtype)
        library.call(_SHIFT, x.data_ptr(), y, out.data_ptr(), x.numel())
        return out
    return None


def _multiply(library: Library, args: Any, allocate: Allocate) -> torch.Tensor | None:
    x, factor = args
    if not _is_dense(x, torch.float32) or not isinstance(factor, float):
        return None
    out = allocate(x.shape, x.dtype)
    library.call(_SCALE, x.data_ptr(), factor, out.data_ptr(), x.numel())
    return out


def _contiguous(library: Library, args: Any, allocate: Allocate) -> torch.Tensor | None:
    """Rows with a larger stride, as `split` leaves them of a fused GEMM's result."""
    (x,) = args
    if x.is_contiguous() or x.dtype != torch.float32 or x.dim() < 2 or not x.numel() or not x[0].is_contiguous():
        return None
    out = allocate(x.shape, x.dtype)
    library.call(_COPY_ROWS, x.data_ptr(), x.stride(0), out.data_ptr(), x.shape[0], x[0].numel())
    return out


def _cat(library: Library, args: tuple[list[torch.Tensor], int], allocate: Allocate) -> torch.Tensor | None:
    """Matrices side by side."""
    parts, dim = (*args, 0)[:2]
    if dim not in (1, -1) or not all(_is_dense(part, torch.float32) and part.dim() == 2 for part in parts):
        return None
    rows, width = len(parts[0]), sum(part.shape[1] for part in parts)
    out = allocate(torch.Size((rows, width)), torch.float32)
    for part, columns in zip(parts, out.split([part.shape[1] for part in parts], dim=1), strict=True):
        library.call(_PLACE_ROWS, part.data_ptr(), columns.data_ptr(), width, rows, part.shape[1])
    return out


def _is_dense(x: Any, dtype: torch.dtype) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype == dtype and x.is_contiguous() and x.dim() > 0


_HANDLERS: dict[Any, Callable[[Library, Any, Allocate], torch.Tensor | None]] = {
    _aten.add.Tensor: _add,
    _aten.mul.Tensor: _multiply,
    _aten.contiguous.default: _contiguous,
    _aten.cat.default: _cat,
}
