"""What the kernels take: kinds of elements, contiguous float32, addresses."""

from __future__ import annotations

import torch

from llm.kernels.weight import FLOAT_KINDS

# As `Kind` (kinds.h).
KINDS = {dtype: number for number, dtype in enumerate(FLOAT_KINDS)}


def as_float32(x: torch.Tensor) -> torch.Tensor:
    """`x` as contiguous float32, itself when it is."""
    if x.dtype == torch.float32 and x.is_contiguous():
        return x
    return x.float().contiguous()


def in_type(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A float32 result in the type of what it was computed from; `Tensor.to` takes a while to find nothing to do."""
    return x if dtype == torch.float32 else x.to(dtype)


def pointer(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
