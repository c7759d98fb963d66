"""Activations that no model here uses, under vLLM's names. Shapes and types are as in `llm.layers.activation`."""

from __future__ import annotations

import torch

from llm.base.custom_op import CustomOp
from llm.kernels.reference import activation
from llm.layers.kernel_op import KernelOp


@CustomOp.register("mul_and_silu")
class MulAndSilu(KernelOp):
    """x[..., :d] * silu(x[..., d:]): SwiGLU with the gate in the second half."""

    operations = ("mul_and_silu",)


@CustomOp.register("gelu_fast")
class FastGELU(KernelOp):
    """0.5 x (1 + tanh(0.7978845608 x (1 + 0.044715 x^2))).

    The constant is sqrt(2 / pi) to ten digits, so in float32 this is `NewGELU`.
    """

    operations = ("gelu_new",)


@CustomOp.register("swigluoai_and_mul")
class SwigluOAIAndMul(CustomOp):
    """(u + 1) g sigmoid(alpha g), g = min(x[..., ::2], limit), u = x[..., 1::2] within +-limit: gpt-oss.

    Gate and value are interleaved, channel by channel.
    """

    def __init__(
        self,
        alpha: float = activation.SWIGLUOAI_ALPHA,
        limit: float = activation.SWIGLUOAI_LIMIT,
        *,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.alpha = alpha
        self.limit = limit

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        return activation.swigluoai_and_mul(x, self.alpha, self.limit)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}, limit={self.limit}"


@CustomOp.register("silu_and_mul_with_clamp")
class SiluAndMulWithClamp(CustomOp):
    """g sigmoid(alpha g) (u + beta), g = min(x[..., :d], limit), u = x[..., d:] within +-limit.

    With the defaults it is silu(g) u, as in the shared experts of DeepSeek V4.
    """

    def __init__(
        self, swiglu_limit: float, alpha: float = 1.0, beta: float = 0.0, *, enforce_enable: bool = False
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.swiglu_limit = swiglu_limit
        self.alpha = alpha
        self.beta = beta

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        return activation.silu_and_mul_with_clamp(x, self.swiglu_limit, self.alpha, self.beta)

    def extra_repr(self) -> str:
        return f"swiglu_limit={self.swiglu_limit}, alpha={self.alpha}, beta={self.beta}"


@CustomOp.register("swiglustep_and_mul")
class SwigluStepAndMul(CustomOp):
    """min(silu(x[..., :d]), limit) * (x[..., d:] within +-limit): Step 3.5. The clamp comes after silu."""

    def __init__(self, limit: float = 7.0, *, enforce_enable: bool = False) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.limit = limit

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        return activation.swiglustep_and_mul(x, self.limit)

    def extra_repr(self) -> str:
        return f"limit={self.limit}"


@CustomOp.register("fatrelu_and_mul")
class FatreluAndMul(CustomOp):
    """(x[..., :d] where it exceeds `threshold`, else 0) * x[..., d:]: MiniCPM-S (arXiv:2402.13516)."""

    def __init__(self, threshold: float = 0.0, *, enforce_enable: bool = False) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.threshold = threshold

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        return activation.fatrelu_and_mul(x, self.threshold)

    def extra_repr(self) -> str:
        return f"threshold={self.threshold}"
