"""Activations, plain and gated."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """float [..., 2d] -> [..., d]: silu of the first half times the second."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_and_mul(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """float [..., 2d] -> [..., d]: gelu of the first half times the second; `approximate` as in torch."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate).mul_(up)


def gelu_new(x: torch.Tensor) -> torch.Tensor:
    """float [...] -> [...]: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
    return F.gelu(x, approximate="tanh")


def relu(x: torch.Tensor) -> torch.Tensor:
    """float [...] -> [...]: max(x, 0)."""
    return F.relu(x)
