"""Gated activations."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """float [..., 2d] -> [..., d]: silu of the first half times the second."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
