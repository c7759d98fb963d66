"""float32 arithmetic that is rounded once where PyTorch would round twice."""

from __future__ import annotations

import torch


def fused_multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c in float32, rounded once; on Apple's GPUs as they do it.

    The product is exact in float64. The sum is rounded to odd in float64, so that rounding it to float32 gives the
    correctly rounded result (Boldo and Melquiond, 2008).
    """
    if a.device.type == "mps":  # which has no float64
        return torch.addcmul(c.float(), a.float(), b.float())
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    even = (total.view(torch.int64) & 1) == 0
    toward = torch.where(error > 0, torch.inf, -torch.inf)
    odd = torch.nextafter(total, toward)
    return torch.where((error != 0) & even & total.isfinite(), odd, total).float()
