"""Activations as CustomOps, under vLLM's names.

All compute in float32 and return the input's type. Shapes: [..., 2d] -> [..., d] for gated activations (those named
`...And...`; the gate is the first half unless stated otherwise), [...] -> [...] for the others.
"""

from __future__ import annotations

import torch

from llm.base.custom_op import CustomOp
from llm.base.errors import ValidationError
from llm.kernels.backend import Operations
from llm.layers.kernel_op import KernelOp


def check_approximate(approximate: str) -> str:
    if approximate not in ("none", "tanh"):
        raise ValidationError(
            f"approximate={approximate!r} is no form of gelu; use 'none' or 'tanh'.",
            parameter="approximate",
            value=approximate,
        )
    return approximate


@CustomOp.register("silu_and_mul")
class SiluAndMul(KernelOp):
    """silu(x[..., :d]) * x[..., d:] for x of width 2d: the gate of a SwiGLU feed-forward (arXiv:2002.05202)."""

    operations = ("silu_and_mul",)


@CustomOp.register("gelu_and_mul")
class GeluAndMul(KernelOp):
    """gelu(x[..., :d]) * x[..., d:] (GeGLU, arXiv:2002.05202); `approximate` is "none" or "tanh"."""

    operations = ("gelu_and_mul",)

    def __init__(self, approximate: str = "none", *, enforce_enable: bool = False) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.approximate = check_approximate(approximate)

    def compute(self, ops: Operations, x: torch.Tensor) -> torch.Tensor:
        return ops.gelu_and_mul(x, self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


@CustomOp.register("gelu_new")
class NewGELU(KernelOp):
    """GPT-2's gelu: the tanh approximation (arXiv:1606.08415)."""

    operations = ("gelu_new",)


@CustomOp.register("relu")
class ReLU(KernelOp):
    """max(x, 0)."""

    operations = ("relu",)


@CustomOp.register("gelu")
class GELU(KernelOp):
    """0.5 x (1 + erf(x / sqrt(2))) (arXiv:1606.08415)."""

    operations = ("gelu",)

    def compute(self, ops: Operations, x: torch.Tensor) -> torch.Tensor:
        return ops.gelu(x, "none")


@CustomOp.register("gelu_tanh")
class GELUTanh(KernelOp):
    """The tanh approximation of gelu, Hugging Face's "gelu_pytorch_tanh"."""

    operations = ("gelu",)

    def compute(self, ops: Operations, x: torch.Tensor) -> torch.Tensor:
        return ops.gelu(x, "tanh")


@CustomOp.register("relu2")
class ReLUSquaredActivation(KernelOp):
    """max(x, 0)^2 (arXiv:2109.08668)."""

    operations = ("relu2",)


@CustomOp.register("quick_gelu")
class QuickGELU(KernelOp):
    """x sigmoid(1.702 x): CLIP's gelu."""

    operations = ("quick_gelu",)
