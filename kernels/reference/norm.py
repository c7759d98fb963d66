"""Normalisation over the last dimension, computed in float32 whatever the type of the weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """float32 [..., d], weight [d] -> float32 [..., d]: x / sqrt(mean(x^2) + eps) * weight."""
    variance = x.square().mean(dim=-1, keepdim=True)
    return (x * torch.rsqrt(variance + eps)).mul_(weight)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """float32 [..., d], weight and bias [d] -> float32 [..., d]: (x - mean) / sqrt(variance + eps) * weight + bias."""
    return F.layer_norm(x, x.shape[-1:], weight.float(), bias.float(), eps)
