"""Activations as CustomOps."""

from __future__ import annotations

import torch

from llm.kernels.reference.activation import silu_and_mul
from llm.layers.custom_op import CustomOp


@CustomOp.register("silu_and_mul")
class SiluAndMul(CustomOp):
    """silu(x[..., :d]) * x[..., d:] for x of width 2d: the gate of a SwiGLU feed-forward (arXiv:2002.05202)."""

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(x)
