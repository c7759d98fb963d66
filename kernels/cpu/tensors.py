"""Tensors as kernel arguments: element kinds, contiguous float32, addresses."""

from __future__ import annotations

import torch

from llm.kernels.weight import FLOAT_KINDS

# As `Kind` (kinds.h).
KINDS = {dtype: number for number, dtype in enumerate(FLOAT_KINDS)}


def as_float32(x: torch.Tensor) -> torch.Tensor:
    """`x` as contiguous float32; `x` itself if it is that already."""
    if x.dtype == torch.float32 and x.is_contiguous():
        return x
    return x.float().contiguous()


def in_type(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A float32 result converted to `dtype`. `Tensor.to` is skipped for float32: it takes time even to do nothing."""
    return x if dtype == torch.float32 else x.to(dtype)


def pointer(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
