"""Normalisation over the last dimension: computed in float32 whatever the types, rounded once to the input's."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

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
