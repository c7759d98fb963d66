"""Normalisation over the last dimension: computed in float32 whatever the types, rounded once to the input's."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    variance_size: int | None = None,
    weight_offset: float = 0.0,
) -> torch.Tensor:
    """float [..., d], weight [d] or None -> float [..., d]: x / sqrt(mean(x^2) + eps) * (weight + weight_offset).

    `variance_size`: the mean is over that many leading channels; None: over all.
    """
    wide = x.float()
    variance = wide[..., :variance_size].square().mean(dim=-1, keepdim=True)
    normed = wide * torch.rsqrt(variance + eps)
    if weight is not None:
        normed *= weight.float() + weight_offset if weight_offset else weight
    return normed.to(x.dtype)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    variance_size: int | None = None,
    weight_offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual): the norm is of the float32 sum, the returned sum is rounded."""
    total = x.float() + residual.float()
    return rms_norm(total, weight, eps, variance_size, weight_offset).to(x.dtype), total.to(x.dtype)


def group_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, groups: int) -> torch.Tensor:
    """`rms_norm` with the mean taken within each of `groups` equal runs of channels."""
    normed = rms_norm(x.float().unflatten(-1, (groups, x.shape[-1] // groups)), None, eps)
    return normed.flatten(-2).mul_(weight).to(x.dtype)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """float [..., d], weight and bias [d] -> float [..., d]: (x - mean) / sqrt(variance + eps) * weight + bias."""
    return F.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), eps).to(x.dtype)


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(layer_norm(x + residual), x + residual): the norm is of the float32 sum, the returned sum is rounded."""
    total = x.float() + residual.float()
    return layer_norm(total, weight, bias, eps).to(x.dtype), total.to(x.dtype)
