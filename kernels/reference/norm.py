"""Root-mean-square normalisation, computed in float32 whatever the type of the weight."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """float32 [..., d], weight [d] -> float32 [..., d]."""
    variance = x.square().mean(dim=-1, keepdim=True)
    return (x * torch.rsqrt(variance + eps)).mul_(weight)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual), x + residual)."""
    total = x + residual
    return rms_norm(total, weight, eps), total
