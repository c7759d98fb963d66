"""What the elementwise kernels take: element types, contiguous float32, addresses."""

from __future__ import annotations

import torch

# As `Kind` in the sources.
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def as_float32(x: torch.Tensor) -> torch.Tensor:
    """`x` as contiguous float32, itself when it is."""
    if x.dtype == torch.float32 and x.is_contiguous():
        return x
    return x.float().contiguous()


def pointer(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
