"""Norms, rotation by position, sums, products and copies of rows, in plain PyTorch.

Norms and rotation are computed in float32 whatever the types, and rounded once to the input's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F


def select_rows(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Row i is x[indices[i]]: float or int64 [n, w], int64 [m] -> [m, w]; IndexError for an index outside [0, n)."""
    return x.index_select(0, indices)


def multiply(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """float [n, w] twice -> [n, w] of the type of x: x * y."""
    return (x * y).to(x.dtype)


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """float [n, w] twice -> [n, w] of the type of x: x + y."""
    return (x + y).to(x.dtype)


def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    """float32, in place: x * factor."""
    return x.mul_(factor)


def ids_below(ids: torch.Tensor, limit: int) -> torch.Tensor:
    """int64 [n] -> [n]: ids below `limit`, and 0 in the place of others."""
    return torch.where(ids < limit, ids, 0)


GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    variance_size: int | None = None,
    weight_offset: float = 0.0,
    rounds_first: bool = False,
) -> torch.Tensor:
    """float [..., d], weight [d] or None -> float [..., d]: x / sqrt(mean(x^2) + eps) * (weight + weight_offset).

    `variance_size`: the mean is over that many leading channels; None: over all. `rounds_first`: the quotient is
    rounded to the type of x before it is multiplied.
    """
    return _rms_norm(x.float(), x.dtype, weight, eps, variance_size, weight_offset, rounds_first)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    variance_size: int | None = None,
    weight_offset: float = 0.0,
    rounds_first: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual): the norm is of the float32 sum, the returned sum is rounded."""
    total = x.float() + residual.float()
    normed = _rms_norm(total, x.dtype, weight, eps, variance_size, weight_offset, rounds_first)
    return normed, total.to(x.dtype)


def _rms_norm(
    wide: torch.Tensor,
    dtype: torch.dtype,
    weight: torch.Tensor | None,
    eps: float,
    variance_size: int | None,
    weight_offset: float,
    rounds_first: bool,
) -> torch.Tensor:
    variance = wide[..., :variance_size].square().mean(dim=-1, keepdim=True)
    normed = wide * torch.rsqrt(variance + eps)
    if rounds_first:
        normed = normed.to(dtype).float()
    if weight is not None:
        normed *= weight.float() + weight_offset if weight_offset else weight
    return normed.to(dtype)


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


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    groups: int = 1,
    norm_before_gate: bool = False,
    activation: str = "silu",
) -> torch.Tensor:
    """float [..., d] -> float [..., d]: norm(x * act(gate)), or norm(x) * act(gate).

    The mean square is taken within each of `groups` equal runs of channels.

    Args:
        gate: of the shape of x; None: no gate.
        weight: float [d]; None: no norm.
        activation: act, "silu" or "sigmoid".
    """
    check_gated_norm(x, gate, weight, groups, activation)
    y = x.float()
    factor = None if gate is None else GATES[activation](gate.float())
    if factor is not None and not norm_before_gate:
        y = y * factor
    if weight is not None:
        y = group_rms_norm(y, weight, eps, groups)
    if factor is not None and norm_before_gate:
        y = y * factor
    return y.to(x.dtype)


def check_gated_norm(
    x: torch.Tensor, gate: torch.Tensor | None, weight: torch.Tensor | None, groups: int, activation: str
) -> None:
    """ValueError for shapes that do not fit, and for an unknown activation."""
    if activation not in GATES:
        raise ValueError(f"a gate has the activations {', '.join(GATES)}, got {activation!r}")
    width = x.shape[-1]
    if groups < 1 or width % groups or (gate is not None and gate.shape != x.shape):
        raise ValueError(f"x has shape {list(x.shape)}, with {groups} groups and a gate of another shape")
    if weight is not None and weight.shape != (width,):
        raise ValueError(f"weight has shape {list(weight.shape)}, x {list(x.shape)}")


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
