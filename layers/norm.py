"""Normalisations as CustomOps."""

from __future__ import annotations

import torch
from torch import nn

from llm.kernels.reference.norm import add_rms_norm, rms_norm
from llm.layers.custom_op import CustomOp


@CustomOp.register("rms_norm")
class RMSNorm(CustomOp):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 (arXiv:1910.07467).

    Called with a residual it returns (norm(x + residual), x + residual): the pair a decoder layer passes on.
    """

    def __init__(self, hidden_size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=dtype), requires_grad=False)

    def forward_native(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            return rms_norm(x, self.weight, self.eps)
        return add_rms_norm(x, residual, self.weight, self.eps)
