"""RMS norm, gated or not, and layer norm in C++; `kernels/reference/norm.py` defines them."""

from __future__ import annotations

import torch

from llm.kernels.cpu.library import KINDS, Library, as_float32, in_type, pointer
from llm.kernels.cpu.signatures import KERNELS
from llm.kernels.reference.norm import check_gated_norm

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
