"""Normalisations as CustomOps.

Each is called with x alone, or with a residual: then it returns (norm(x + residual), x + residual), the pair that a
decoder layer passes on.
"""

from __future__ import annotations

import torch
from torch import nn

from llm.kernels.reference.norm import layer_norm, rms_norm
from llm.layers.custom_op import CustomOp

Normed = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@CustomOp.register("rms_norm")
class RMSNorm(CustomOp):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 (arXiv:1910.07467)."""

    def __init__(self, hidden_size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=dtype), requires_grad=False)

    def forward_native(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
        if residual is None:
            return rms_norm(x, self.weight, self.eps)
        total = x + residual
        return rms_norm(total, self.weight, self.eps), total


@CustomOp.register("gemma_rms_norm")
class GemmaRMSNorm(CustomOp):
    """RMSNorm whose checkpoint stores weight - 1."""

    def __init__(self, hidden_size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=dtype), requires_grad=False)

    def forward_native(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
        weight = self.weight.float() + 1.0
        if residual is None:
            return rms_norm(x, weight, self.eps)
        total = x + residual
        return rms_norm(total, weight, self.eps), total


@CustomOp.register("layer_norm")
class LayerNorm(CustomOp):
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, in float32 (arXiv:1607.06450)."""

    def __init__(self, hidden_size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(hidden_size, dtype=dtype), requires_grad=False)

    def forward_native(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normed:
        if residual is None:
            return layer_norm(x, self.weight, self.bias, self.eps)
        total = x + residual
        return layer_norm(total, self.weight, self.bias, self.eps), total
