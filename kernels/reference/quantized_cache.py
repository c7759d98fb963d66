"""Keys and values in 8 bits, in plain PyTorch: how they are rounded, and what they stand for.

Owns the rounding of a KV cache of int8 or float8_e4m3fn, which every backend shares, and the layout of this one: the
codes of a token in a KV head, then its scale in bfloat16.

An element is code * scale. The scale of a token in a KV head is its largest magnitude over the largest code, rounded up
to bfloat16; NaN if an element is not finite. With static scales, of channels, it is 1 (or NaN); a code is
x / scale[channel] + offset[channel], and stands for (code - offset[channel]) * scale[channel].
"""

from __future__ import annotations

import torch

from llm.forward import SCALE_BYTES

LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def quantize_heads(
    x: torch.Tensor, dtype: torch.dtype, static: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x float [N, kv_heads, size] -> (codes of `dtype`, scales bfloat16 [N, kv_heads]).

    static: float32 [2, kv_heads, size], scales and offsets of channels.
    """
    x = x.float()
    largest = x.abs().amax(dim=-1)
    finite = largest.isfinite()
    if static is None:
        scale = _rounded_up(torch.where(finite, largest, 0) / LARGEST_CODE[dtype])
        divisor = torch.where(scale == 0, 1, scale.float()).unsqueeze(-1)
    else:
        scale, divisor = torch.ones_like(largest, dtype=torch.bfloat16), static[0]
    quotient = torch.where(finite.unsqueeze(-1), x, 0) / divisor
    if dtype == torch.int8:
        quotient = quotient.round() if static is None else quotient.round() + static[1]
        least = -127 if static is None else -128
        codes = quotient.clamp(least, 127).to(dtype)
    else:
        codes = quotient.clamp(-LARGEST_CODE[dtype], LARGEST_CODE[dtype]).to(dtype)
    return codes, torch.where(finite, scale, float("nan"))


def stored(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """uint8 [N, kv_heads, size + 2], what a cache keeps of a token."""
    return torch.cat((codes.view(torch.uint8), scale.unsqueeze(-1).view(torch.uint8)), dim=-1)


def dequantize_heads(tokens: torch.Tensor, dtype: torch.dtype, static: torch.Tensor | None = None) -> torch.Tensor:
    """uint8 [kv_heads, tokens, size + 2] -> float32 [kv_heads, tokens, size]."""
    codes = tokens[..., :-SCALE_BYTES].contiguous().view(dtype).float()
    scaled = codes * tokens[..., -SCALE_BYTES:].contiguous().view(torch.bfloat16).float()
    return scaled if static is None else (scaled - static[1].unsqueeze(1)) * static[0].unsqueeze(1)


def _rounded_up(x: torch.Tensor) -> torch.Tensor:
    """The least bfloat16 that is not below x, float32 and not negative."""
    return (((x.view(torch.int32) + 0xFFFF) >> 16) << 16).view(torch.float32).to(torch.bfloat16)
