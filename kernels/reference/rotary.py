"""Rotation of channel pairs by position: computed in float32 whatever the type of x, rounded once to that type."""

from __future__ import annotations

import torch


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_neox_style: bool = True) -> torch.Tensor:
    """Rotate the first 2d channels of each head; the others stay as they are.

    Channel i is paired with i + d (neox, Hugging Face's order), or 2i with 2i + 1 (interleaved, GPT-J's).

    Shapes: x float [..., N, heads, head_size], cos and sin float32 [N, d] with 2d <= head_size; returns x's shape.
    """
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    rotated = x[..., : 2 * half].float()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    first, second = (slice(0, half), slice(half, 2 * half)) if is_neox_style else (slice(0, None, 2), slice(1, None, 2))
    out_rotated = out[..., : 2 * half]
    out_rotated[..., first] = rotated[..., first] * cos - rotated[..., second] * sin
    out_rotated[..., second] = rotated[..., second] * cos + rotated[..., first] * sin
    out[..., 2 * half :] = x[..., 2 * half :]
    return out


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    head_size: int,
    is_neox_style: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [N, heads * head_size] and key [N, kv_heads * head_size], rotated by their tokens' positions int64 [N].

    cos_sin_cache float32 [positions, 2d]: cosines, then sines.
    """
    cos, sin = cos_sin_cache.index_select(0, positions).chunk(2, dim=-1)
    rotated = (
        apply_rotary(x.view(x.shape[0], x.shape[1] // head_size, head_size), cos, sin, is_neox_style)
        for x in (query, key)
    )
    query_out, key_out = (x.view(x.shape[0], x.shape[1] * x.shape[2]) for x in rotated)
    return query_out, key_out
