"""Norms, with and without a residual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from llm.layers import norm
from llm.layers.norm import Mixer2RMSNormGated, RMSNormGated
from op_cases.activations import sigmoid
from op_cases.base import Case, tensors

NORM_WIDTH = 66


def rms_reference(op: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    """torch.nn.functional.rms_norm; with `var_hidden_size`, the formula."""
    total = x if residual is None else x + residual
    weight = torch.ones(x.shape[-1]) if op.weight is None else op.weight
    weight = weight.double() + (1.0 if isinstance(op, norm.GemmaRMSNorm) else 0.0)
    leading = getattr(op, "variance_size_override", None)
    if leading is None:
        normed = nn.functional.rms_norm(total, total.shape[-1:], weight, op.variance_epsilon)
    else:
        mean = (total[..., :leading] ** 2).sum(-1, keepdim=True) / leading
        normed = total / (mean + op.variance_epsilon).sqrt() * weight
    return normed if residual is None else (normed, total)


def layer_norm_reference(op: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    """torch.nn.LayerNorm."""
    total = x if residual is None else x + residual
    module = nn.LayerNorm(x.shape[-1], op.eps, dtype=torch.float64)
    module.weight.data.copy_(op.weight.double() + (1.0 if isinstance(op, norm.LayerNorm1P) else 0.0))
    module.bias.data.copy_(op.bias)
    normed = module(total).detach()
    return normed if residual is None else (normed, total)


def gated_rms(x: torch.Tensor, weight: torch.Tensor, eps: float, groups: int) -> torch.Tensor:
    runs = [run / (run.pow(2).mean(-1, keepdim=True) + eps).sqrt() for run in x.chunk(groups, dim=-1)]
    return torch.cat(runs, dim=-1) * weight.double()


def rms_norm_gated_reference(op: Any, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
    gate = torch.ones_like(x)
    if z is not None:
        gate = sigmoid(z) if op.activation == "sigmoid" else z * sigmoid(z)
    if op.norm_before_gate:
        return gated_rms(x, op.weight, op.eps, op.groups) * gate
    return gated_rms(x * gate, op.weight, op.eps, op.groups)


def mixer2_reference(op: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    if op.norm_before_gate:
        return gated_rms(x, op.weight, op.variance_epsilon, op.n_groups) * gate * sigmoid(gate)
    gated = x * gate * sigmoid(gate)
    return gated if op.weight is None else gated_rms(gated, op.weight, op.variance_epsilon, op.n_groups)


def with_and_without_residual(
    build: Callable[[torch.dtype], nn.Module], reference: Callable[..., Any], roundings: int = 1
) -> list[Case]:
    one, two = tensors(NORM_WIDTH, scale=3.0), tensors(NORM_WIDTH, NORM_WIDTH, scale=3.0)
    return [Case(build, inputs, reference, roundings=roundings) for inputs in (one, two)]


def gated_norm(reference: Callable[..., Any], build: Callable[[torch.dtype], nn.Module], inputs: int = 2) -> Case:
    return Case(build, tensors(*[NORM_WIDTH] * inputs), reference)


NORMS: dict[str, list[Case]] = {
    "rms_norm": [
        *with_and_without_residual(lambda dtype: norm.RMSNorm(NORM_WIDTH, 1e-5, dtype=dtype), rms_reference, 2),
        *with_and_without_residual(
            lambda dtype: norm.RMSNorm(NORM_WIDTH, var_hidden_size=20, dtype=dtype), rms_reference, 2
        ),
        *with_and_without_residual(lambda dtype: norm.RMSNorm(NORM_WIDTH, has_weight=False), rms_reference),
    ],
    "gemma_rms_norm": with_and_without_residual(
        lambda dtype: norm.GemmaRMSNorm(NORM_WIDTH, 1e-5, dtype=dtype), rms_reference
    ),
    "layer_norm": [
        *with_and_without_residual(lambda dtype: norm.LayerNorm(NORM_WIDTH, 1e-5, dtype=dtype), layer_norm_reference),
        *with_and_without_residual(
            lambda dtype: norm.LayerNorm(NORM_WIDTH, dtype=dtype, has_bias=False), layer_norm_reference
        ),
        *with_and_without_residual(
            lambda dtype: norm.LayerNorm(NORM_WIDTH, dtype=dtype, has_weight=False, has_bias=False),
            layer_norm_reference,
        ),
    ],
    "layer_norm_1p": with_and_without_residual(
        lambda dtype: norm.LayerNorm1P(NORM_WIDTH, 1e-5, dtype=dtype), layer_norm_reference
    ),
    "rms_norm_gated": [
        gated_norm(rms_norm_gated_reference, lambda dtype: RMSNormGated(NORM_WIDTH, dtype=dtype)),
        gated_norm(rms_norm_gated_reference, lambda dtype: RMSNormGated(NORM_WIDTH, dtype=dtype), inputs=1),
        gated_norm(
            rms_norm_gated_reference,
            lambda dtype: RMSNormGated(NORM_WIDTH, group_size=22, norm_before_gate=True, dtype=dtype),
        ),
        gated_norm(
            rms_norm_gated_reference,
            lambda dtype: RMSNormGated(NORM_WIDTH, group_size=11, activation="sigmoid", dtype=dtype),
        ),
    ],
    "mixer2_gated_rms_norm": [
        gated_norm(mixer2_reference, lambda dtype: Mixer2RMSNormGated(NORM_WIDTH, 3, dtype=dtype)),
        gated_norm(mixer2_reference, lambda dtype: Mixer2RMSNormGated(NORM_WIDTH, 1, use_rms_norm=False)),
        gated_norm(
            mixer2_reference, lambda dtype: Mixer2RMSNormGated(NORM_WIDTH, 2, dtype=dtype, norm_before_gate=True)
        ),
    ],
}
