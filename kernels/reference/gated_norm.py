"""Gated norms of recurrent mixers: computed in float32 whatever the types, rounded once to the input's."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from llm.kernels.reference.norm import group_rms_norm

GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


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
