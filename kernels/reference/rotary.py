"""Rotation of channel pairs by position."""

from __future__ import annotations

import torch


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first 2d channels of each head, pairing channel i with i + d.

    Shapes: x float32 [N, heads, head_size], cos and sin float32 [N, d] with 2d <= head_size; returns x's shape.
    """
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x[..., :half], x[..., half : 2 * half]
    out = torch.empty(x.shape, dtype=x.dtype)
    out[..., :half] = first * cos - second * sin
    out[..., half : 2 * half] = second * cos + first * sin
    out[..., 2 * half :] = x[..., 2 * half :]
    return out
