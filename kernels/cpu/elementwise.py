"""Norms, rotation by position, sums, products and selection of rows in C++; `kernels/reference/elementwise.py` defines
them. And kernels with the bits of what a recorded step would leave to PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from llm.kernels.cpu.library import KINDS, Library, as_float32, in_type, pointer
from llm.kernels.cpu.signatures import KERNELS
from llm.kernels.reference.elementwise import check_gated_norm

_aten = torch.ops.aten
_ADD = KERNELS["llm_add"]
_SHIFT = KERNELS["llm_shift"]
_SCALE = KERNELS["llm_scale"]
_SCALE_ROWS = KERNELS["llm_scale_rows"]
_OFFSET = KERNELS["llm_offset"]
_CLAMP = KERNELS["llm_clamp"]
_IDS_BELOW = KERNELS["llm_ids_below"]
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


def scale(library: Library, x: torch.Tensor, factor: float) -> torch.Tensor:
    """float32, in place: x * factor."""
    if x.dtype != torch.float32 or not x.is_contiguous():
        raise TypeError(f"scale takes contiguous float32, got {x.dtype}")
    library.call(_SCALE, x.data_ptr(), factor, x.data_ptr(), x.numel(), torch.get_num_threads())
    return x


def ids_below(library: Library, ids: torch.Tensor, limit: int) -> torch.Tensor:
    """int64 [n] -> [n]: ids below `limit`, and 0 in the place of others."""
    ids = ids.contiguous()
    out = torch.empty_like(ids)
    library.call(_IDS_BELOW, ids.data_ptr(), limit, out.data_ptr(), ids.numel())
    return out


def substitute(library: Library, func: Any, args: Any, kwargs: Any, allocate: Allocate) -> torch.Tensor | None:
    """The result of `func(*args, **kwargs)`, in memory from `allocate(shape, dtype)`; None if there is no kernel."""
    handler = _HANDLERS.get(func)
    return None if handler is None or kwargs else handler(library, args, allocate)


def _add(library: Library, args: Any, allocate: Allocate) -> torch.Tensor | None:
    x, y = args
    if _is_dense(x, torch.float32) and isinstance(y, float):
        out = allocate(x.shape, x.dtype)
        library.call(_OFFSET, x.data_ptr(), y, out.data_ptr(), x.numel())
        return out
    if isinstance(y, torch.Tensor) and x.shape == y.shape:
        x, y = (_rows_of(library, item, allocate) for item in (x, y))
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
    if _are_rows_and_column(x, factor):
        rows, width = x.shape
        out = allocate(x.shape, x.dtype)
        strided = x.data_ptr(), x.stride(0), factor.data_ptr(), factor.stride(0)
        library.call(_SCALE_ROWS, *strided, out.data_ptr(), rows, width)
        return out
    if not _is_dense(x, torch.float32) or not isinstance(factor, float):
        return None
    out = allocate(x.shape, x.dtype)
    library.call(_SCALE, x.data_ptr(), factor, out.data_ptr(), x.numel(), torch.get_num_threads())
    return out


def _clamp(
    library: Library, args: tuple[torch.Tensor, float | None, float | None], allocate: Allocate
) -> torch.Tensor | None:
    x, low, high = (*args, None)[:3]
    if not _is_dense(x, torch.float32):
        return None
    out = allocate(x.shape, x.dtype)
    limits = -torch.inf if low is None else float(low), torch.inf if high is None else float(high)
    library.call(_CLAMP, x.data_ptr(), *limits, out.data_ptr(), x.numel())
    return out


def _rows_of(library: Library, x: torch.Tensor, allocate: Allocate) -> torch.Tensor:
    """`x`, or its copy without gaps between the rows."""
    copy = _contiguous(library, (x,), allocate)
    return x if copy is None else copy


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
    parts = [_rows_of(library, part, allocate) for part in parts]
    if dim not in (1, -1) or not all(_is_dense(part, torch.float32) and part.dim() == 2 for part in parts):
        return None
    rows, width = len(parts[0]), sum(part.shape[1] for part in parts)
    out = allocate(torch.Size((rows, width)), torch.float32)
    for part, columns in zip(parts, out.split([part.shape[1] for part in parts], dim=1), strict=True):
        library.call(_PLACE_ROWS, part.data_ptr(), columns.data_ptr(), width, rows, part.shape[1])
    return out


def _are_rows_and_column(x: torch.Tensor, factors: object) -> bool:
    """True for float32 [n, w] without gaps in a row and [n, 1]."""
    if not isinstance(factors, torch.Tensor) or x.dtype != torch.float32 or factors.dtype != torch.float32:
        return False
    return x.dim() == 2 and x.stride(1) == 1 and factors.shape == (len(x), 1)


def _is_dense(x: Any, dtype: torch.dtype) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype == dtype and x.is_contiguous() and x.dim() > 0


_HANDLERS: dict[Any, Callable[[Library, Any, Allocate], torch.Tensor | None]] = {
    _aten.add.Tensor: _add,
    _aten.mul.Tensor: _multiply,
    _aten.contiguous.default: _contiguous,
    _aten.cat.default: _cat,
    _aten.clamp.default: _clamp,
}


# --- Norms. ---

_RMS = KERNELS["llm_rms_norm"]
_LAYER = KERNELS["llm_layer_norm"]
_GATED = KERNELS["llm_gated_rms_norm"]


def rms_norm(
    library: Library,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    variance_size: int | None = None,
    weight_offset: float = 0.0,
    rounds_first: bool = False,
) -> torch.Tensor:
    """float [..., d], weight [d] or None -> float [..., d]."""
    wide = as_float32(x)
    out = library.empty_like(wide)
    own = _weight_of(weight, x.dtype, rounds_first)
    _rms_norm(library, wide, None, own, eps, variance_size, weight_offset, out, None)
    return _times_weight(in_type(out, x.dtype), weight, own, weight_offset)


def add_rms_norm(
    library: Library,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    variance_size: int | None = None,
    weight_offset: float = 0.0,
    rounds_first: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual)."""
    wide, wide_residual = as_float32(x), as_float32(residual)
    out, total = library.empty_like(wide), library.empty_like(wide)
    own = _weight_of(weight, x.dtype, rounds_first)
    _rms_norm(library, wide, wide_residual, own, eps, variance_size, weight_offset, out, total)
    return _times_weight(in_type(out, x.dtype), weight, own, weight_offset), in_type(total, x.dtype)


def _weight_of(weight: torch.Tensor | None, dtype: torch.dtype, rounds_first: bool) -> torch.Tensor | None:
    """What the kernel multiplies by. It rounds once: where there is a rounding before, `_times_weight` does it."""
    return None if rounds_first and dtype is not torch.float32 else weight


def _times_weight(
    normed: torch.Tensor, weight: torch.Tensor | None, own: torch.Tensor | None, weight_offset: float
) -> torch.Tensor:
    if weight is None or own is not None:
        return normed
    return (normed.float() * (weight.float() + weight_offset)).to(normed.dtype)


def layer_norm(library: Library, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """float [..., d], weight and bias [d] -> float [..., d]."""
    wide = as_float32(x)
    out = library.empty_like(wide)
    _layer_norm(library, wide, None, weight, bias, eps, out, None)
    return in_type(out, x.dtype)


def add_layer_norm(
    library: Library,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(layer_norm(x + residual), x + residual)."""
    wide, wide_residual = as_float32(x), as_float32(residual)
    out, total = library.empty_like(wide), library.empty_like(wide)
    _layer_norm(library, wide, wide_residual, weight, bias, eps, out, total)
    return in_type(out, x.dtype), in_type(total, x.dtype)


def _rms_norm(
    library: Library,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    variance_size: int | None,
    weight_offset: float,
    out: torch.Tensor,
    total: torch.Tensor | None,
) -> None:
    width = _width(x, weight, residual)
    if variance_size is not None and not 0 < variance_size <= width:
        raise ValueError(f"variance_size must be from 1 to {width}, got {variance_size}")
    library.call(
        _RMS,
        x.data_ptr(),
        pointer(residual),
        0 if weight is None else KINDS[weight.dtype],
        pointer(weight),
        weight_offset,
        eps,
        variance_size or width,
        out.data_ptr(),
        pointer(total),
        x.numel() // width if width else 0,
        width,
        torch.get_num_threads(),
    )


def _layer_norm(
    library: Library,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    total: torch.Tensor | None,
) -> None:
    width = _width(x, weight, residual)
    if bias.dtype != weight.dtype or bias.shape != weight.shape:
        raise ValueError(f"weight and bias differ: {weight.dtype} {weight.shape}, {bias.dtype} {bias.shape}")
    library.call(
        _LAYER,
        x.data_ptr(),
        pointer(residual),
        KINDS[weight.dtype],
        weight.data_ptr(),
        bias.data_ptr(),
        eps,
        out.data_ptr(),
        pointer(total),
        x.numel() // width if width else 0,
        width,
        torch.get_num_threads(),
    )


def _width(x: torch.Tensor, weight: torch.Tensor | None, residual: torch.Tensor | None) -> int:
    width = x.shape[-1]
    if weight is not None and weight.shape != (width,):
        raise ValueError(f"weight has shape {list(weight.shape)}, x {list(x.shape)}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual has shape {list(residual.shape)}, x {list(x.shape)}")
    return width


def gated_rms_norm(
    library: Library,
    x: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    groups: int = 1,
    norm_before_gate: bool = False,
    activation: str = "silu",
) -> torch.Tensor:
    """float [..., d], gate of the same shape or None, weight [d] or None (no norm) -> float [..., d]."""
    check_gated_norm(x, gate, weight, groups, activation)
    if gate is None and weight is None:
        return x
    width = x.shape[-1]
    (wide, x_stride), (z, gate_stride) = _rows(x), (None, 0) if gate is None else _rows(gate)
    out = library.empty(*x.shape)
    library.call(
        *(_GATED, wide.data_ptr(), x_stride, pointer(z), gate_stride),
        *(0 if weight is None else KINDS[weight.dtype], pointer(weight), eps, groups),
        *(norm_before_gate, activation == "sigmoid", out.data_ptr()),
        *(x.numel() // width if width else 0, width, torch.get_num_threads()),
    )
    return in_type(out, x.dtype)


def _rows(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(float32, contiguous within a row; the stride between rows): a slice of a GEMM's result is read where it is."""
    if x.dtype == torch.float32 and x.dim() == 2 and x.stride(1) == 1:
        return x, x.stride(0)
    return as_float32(x), x.shape[-1]


_ROTARY = KERNELS["llm_rotary"]


def rotary_embedding(
    library: Library,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    head_size: int,
    is_neox_style: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernels.reference.rotary.rotary_embedding`.

    Raises:
        IndexError: a position is outside the table.
        ValueError: the numbers of queries, keys and positions differ.
    """
    dtype = query.dtype
    (query, query_stride), (key, key_stride) = _strided_rows(query), _rows(key)
    (tokens, width), (keys, key_width) = query.shape, key.shape
    if keys != tokens or positions.shape != (tokens,):
        raise ValueError(f"{tokens} tokens need as many positions and keys, got {list(positions.shape)}, {keys}")
    length, rotated = cos_sin_cache.shape
    query_out, key_out = library.empty(tokens, width), library.empty(tokens, key_width)
    bad = library.call(
        _ROTARY,
        positions.data_ptr(),
        tokens,
        cos_sin_cache.data_ptr(),
        length,
        rotated // 2,
        is_neox_style,
        query.data_ptr(),
        query_stride,
        query_out.data_ptr(),
        width // head_size,
        key.data_ptr(),
        key_stride,
        key_out.data_ptr(),
        key_width // head_size,
        head_size,
        torch.get_num_threads(),
    )
    if bad >= 0:
        raise _no_such_position(positions, bad, length)
    return in_type(query_out, dtype), in_type(key_out, dtype)


def _no_such_position(positions: torch.Tensor, token: int, length: int) -> IndexError:
    return IndexError(f"positions[{token}] is {int(positions[token])}, the rotary table has {length}")


def _strided_rows(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(float32 [N, width], contiguous within a row; the stride between rows)."""
    x = x if x.dtype == torch.float32 else x.float()
    between, inside = x.stride()
    return (x, between) if inside == 1 else (x.contiguous(), x.shape[1])
