"""Gated norms in C++; `kernels/reference/gated_norm.py` defines them."""

from __future__ import annotations

import torch

from llm.kernels.cpu.library import Library
from llm.kernels.cpu.signatures import KERNELS
from llm.kernels.cpu.tensors import KINDS, as_float32, in_type, pointer
from llm.kernels.reference.gated_norm import check_gated_norm

_GATED = KERNELS["llm_gated_rms_norm"]


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
