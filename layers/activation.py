"""Activations as CustomOps."""

from __future__ import annotations

import torch

from llm.kernels.reference import activation
from llm.layers.custom_op import CustomOp


@CustomOp.register("silu_and_mul")
class SiluAndMul(CustomOp):
    """silu(x[..., :d]) * x[..., d:] for x of width 2d: the gate of a SwiGLU feed-forward (arXiv:2002.05202)."""

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        return activation.silu_and_mul(x)


@CustomOp.register("gelu_and_mul")
class GeluAndMul(CustomOp):
    """gelu(x[..., :d]) * x[..., d:]; `approximate` is "none" or "tanh"."""

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        return activation.gelu_and_mul(x, self.approximate)


@CustomOp.register("gelu_new")
class NewGELU(CustomOp):
    """GPT-2's gelu: the tanh approximation (arXiv:1606.08415)."""

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        return activation.gelu_new(x)


@CustomOp.register("relu")
class ReLU(CustomOp):
    """max(x, 0)."""

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        return activation.relu(x)
