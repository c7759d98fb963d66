"""Quantizing a float weight in C++, while it is loaded; `kernels/reference/quantize_weight.py` defines it."""

from __future__ import annotations

import torch

from llm.base.library_settings import num_threads
from llm.kernels.cpu.library import KINDS, Library, pointer
from llm.kernels.cpu.packed import LANES
from llm.kernels.cpu.signatures import KERNELS
from llm.kernels.reference import quantize_weight as reference
from llm.kernels.reference.quantize_weight import BEYOND, FORMS, NOT_FINITE, check_input_squares
from llm.kernels.reference.rotation import check_block, rotate

_QUANTIZE, _SQUARES = KERNELS["llm_quantize_weight"], KERNELS["llm_column_squares"]
_ROUNDED, _SEARCHED, _FIRST_FORM = range(3)  # `FORMS` from there on
# A weight is rotated so many elements at a time, which stay in the cache.
_ROTATED_ELEMENTS = 1 << 18
# Bits of what the kernel returns.
_NOT_FINITE = 1


def quantize_weight(
    lib: Library,
    weight: torch.Tensor,
    bits: int,
    group_size: int,
    search: bool,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    rotation: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    """(q, scale, signal, noise) as the definition; the last two in another order of sums."""
    if weight.dtype not in KINDS or (rotation and search):
        return reference.quantize_weight(weight, bits, group_size, search, out, rotation)
    rows, columns = weight.shape
    q, scale = out or (torch.empty(rows, columns, dtype=torch.int8), torch.empty(rows, columns // group_size))
    form = _SEARCHED if search else _ROUNDED
    high = 2 ** (bits - 1) - 1
    signal, noise = _quantize_into(lib, weight, form, group_size, q, scale, high=high, rotation=rotation)
    return q, scale, signal, noise


def _quantize_into(
    lib: Library,
    weight: torch.Tensor,
    form: int,
    group_size: int,
    q: torch.Tensor,
    scale: torch.Tensor,
    minimum: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
    high: int = 0,
    rotation: int = 0,
    input_squares: torch.Tensor | None = None,
) -> tuple[float, float]:
    """Writes q, scale and minimum; returns the sums of W^2 and of its error's squares.

    Raises ValueError: shapes and types that do not fit, or a weight that cannot be quantized.
    """
    rows, columns = weight.shape
    if columns % group_size:
        raise ValueError(f"groups of {group_size} do not divide {columns} columns")
    if rotation:
        check_block(rotation, columns)
    weight = weight.contiguous()
    if not (q.is_contiguous() and scale.is_contiguous() and q.shape == weight.shape and q.itemsize == 1):
        raise ValueError(f"q is contiguous, of one byte, {list(weight.shape)}, got {q.dtype} {list(q.shape)}")
    leveled = minimum is not None and minimum.dtype == torch.uint8
    groups = rows * (columns // group_size)
    if scale.dtype != torch.float32 or scale.numel() != (rows if leveled else groups):
        raise ValueError(f"scale is float32 {[rows, columns // group_size]}, got {scale.dtype} {list(scale.shape)}")
    if leveled and minimum is not None and (minimum.numel() != groups or not minimum.is_contiguous()):
        raise ValueError(f"levels are {[rows, columns // group_size]}, got {list(minimum.shape)}")
    energies = torch.zeros(max(rows, -(-scale.numel() // LANES)), 2, dtype=torch.float64)
    if input_squares is not None:
        check_input_squares(input_squares, columns, group_size, rotation)
    places = (weight.data_ptr(), q.data_ptr(), scale.data_ptr(), pointer(minimum), energies.data_ptr())
    tables = (pointer(table), pointer(input_squares))
    sizes = (rows, columns, high, group_size, rotation, num_threads())
    wrong = lib.call(_QUANTIZE, KINDS[weight.dtype], form, *places, *tables, *sizes)
    if wrong:
        raise ValueError(NOT_FINITE if wrong & _NOT_FINITE else BEYOND)
    signal, noise = energies.sum(dim=0).tolist()
    return signal, noise


def quantize_weight_as(
    lib: Library,
    weight: torch.Tensor,
    form: str,
    group_size: int,
    out: reference.Parts | None = None,
    rotation: int = 0,
    input_squares: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, float, float]:
    """(q, scale, minimum, signal, noise) as the definition; the last two in another order of sums."""
    if weight.dtype not in KINDS or form not in FORMS or (input_squares is not None and form != "two_levels"):
        return reference.quantize_weight_as(weight, form, group_size, out, rotation, input_squares)
    rows, columns = weight.shape
    q, scale, minimum = out or reference.empty(form, rows, columns, group_size)
    if rotation and form != "two_levels":  # which the kernel rotates itself
        signal = noise = 0.0
        step = max(1, _ROTATED_ELEMENTS // max(1, columns))
        for start in range(0, rows, step):
            part = slice(start, start + step)
            parts = (q[part], scale[part], None if minimum is None else minimum[part])
            *_, own, error = quantize_weight_as(lib, rotate(weight[part], rotation), form, group_size, parts)
            signal, noise = signal + own, noise + error
        return q, scale, minimum, signal, noise
    table = torch.tensor(reference.NF4) if form == "nf4" else None
    if form == "q4_k" and columns % reference.SUPER_BLOCK:
        raise ValueError(f"blocks of {reference.SUPER_BLOCK} do not divide {columns} columns")
    signal, noise = _quantize_into(
        lib,
        weight,
        _FIRST_FORM + FORMS.index(form),
        group_size,
        q,
        scale,
        minimum,
        table,
        rotation=rotation,
        input_squares=input_squares,
    )
    return q, scale, minimum, signal, noise


def column_squares(lib: Library, weight: torch.Tensor) -> torch.Tensor:
    """As the definition."""
    if weight.dtype not in KINDS:
        return reference.column_squares(weight)
    rows, columns = weight.shape
    weight = weight.contiguous()
    sums = torch.empty(columns, dtype=torch.int64)
    if lib.call(_SQUARES, KINDS[weight.dtype], weight.data_ptr(), sums.data_ptr(), rows, columns, num_threads()):
        raise ValueError(NOT_FINITE)
    return sums
