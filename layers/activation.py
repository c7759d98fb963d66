"""Activations as CustomOps, under vLLM's names; some are for models of your own, and plain PyTorch without a kernel.

All compute in float32 and return the input's type. Shapes: [..., 2d] -> [..., d] for gated activations (those named
`...And...`; the gate is the first half unless stated otherwise), [...] -> [...] for the others.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist

import torch
from torch import nn

from llm.base.custom_op import CustomOp
from llm.errors import ValidationError
from llm.kernels.backend import Operations
from llm.kernels.reference import activation as reference
from llm.layers.custom_op import KernelOp


def _check_approximate(approximate: str) -> str:
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
        self.approximate = _check_approximate(approximate)

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


@CustomOp.register("gelu_and_mul_sparse")
class GeluAndMulSparse(KernelOp):
    """`GeluAndMul` with a sparse gate (Gemma 3n): gelu(relu(gate - cut)) * up.

    cut = mean + z std of the gate's row (std biased), with z the quantile of the normal distribution at
    `activation_sparsity`.

    Args:
        activation_sparsity: expected share of zeros, in (0, 1).
        approximate: "none" or "tanh".
    """

    operations = ("gelu_and_mul_sparse",)

    def __init__(self, activation_sparsity: float, approximate: str = "none", *, enforce_enable: bool = False) -> None:
        super().__init__(enforce_enable=enforce_enable)
        if not 0.0 < activation_sparsity < 1.0:
            raise ValidationError(
                f"activation_sparsity={activation_sparsity!r} is out of range; use a share between 0 and 1, or "
                "GeluAndMul for no sparsity.",
                parameter="activation_sparsity",
                value=activation_sparsity,
            )
        self.approximate = _check_approximate(approximate)
        self.std_multiplier = NormalDist().inv_cdf(activation_sparsity)

    def compute(self, ops: Operations, x: torch.Tensor) -> torch.Tensor:
        return ops.gelu_and_mul_sparse(x, self.std_multiplier, self.approximate)

    def extra_repr(self) -> str:
        return f"std_multiplier={self.std_multiplier:.4g}, approximate={self.approximate!r}"


@CustomOp.register("xielu")
class XIELU(KernelOp):
    """xIELU (arXiv:2411.13010), the activation of Apertus, with two trained slopes; see `kernels/reference`.

    Args:
        alpha_p_init, alpha_n_init: initial slopes for positive and negative x. The parameters alpha_p and alpha_n [1]
            hold them before softplus, as checkpoints do (alpha_n: minus `beta`).
        beta: slope at zero, a parameter of no dimension.
        eps: negative; the exponential is cut off above it.
        dtype: of the parameters; None: torch's default.
    """

    operations = ("xielu",)

    def __init__(
        self,
        alpha_p_init: float = 0.8,
        alpha_n_init: float = 0.8,
        beta: float = 0.5,
        eps: float = -1e-6,
        dtype: torch.dtype | None = None,
        *,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.alpha_p = self._slope(alpha_p_init, dtype)
        self.alpha_n = self._slope(alpha_n_init - beta, dtype)
        self.beta = nn.Parameter(torch.tensor(beta, dtype=dtype), requires_grad=False)
        self.eps = eps

    @staticmethod
    def _slope(value: float, dtype: torch.dtype | None) -> nn.Parameter:
        before_softplus = torch.tensor([value], dtype=torch.float64).expm1().log()
        return nn.Parameter(before_softplus.to(dtype or torch.get_default_dtype()), requires_grad=False)

    def compute(self, ops: Operations, x: torch.Tensor) -> torch.Tensor:
        return ops.xielu(x, self.alpha_p, self.alpha_n, self.beta, self.eps)


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
        alpha: float = reference.SWIGLUOAI_ALPHA,
        limit: float = reference.SWIGLUOAI_LIMIT,
        *,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.alpha = alpha
        self.limit = limit

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        return reference.swigluoai_and_mul(x, self.alpha, self.limit)

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
        return reference.silu_and_mul_with_clamp(x, self.swiglu_limit, self.alpha, self.beta)

    def extra_repr(self) -> str:
        return f"swiglu_limit={self.swiglu_limit}, alpha={self.alpha}, beta={self.beta}"


@CustomOp.register("swiglustep_and_mul")
class SwigluStepAndMul(CustomOp):
    """min(silu(x[..., :d]), limit) * (x[..., d:] within +-limit): Step 3.5. The clamp comes after silu."""

    def __init__(self, limit: float = 7.0, *, enforce_enable: bool = False) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.limit = limit

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        return reference.swiglustep_and_mul(x, self.limit)

    def extra_repr(self) -> str:
        return f"limit={self.limit}"


@CustomOp.register("fatrelu_and_mul")
class FatreluAndMul(CustomOp):
    """(x[..., :d] where it exceeds `threshold`, else 0) * x[..., d:]: MiniCPM-S (arXiv:2402.13516)."""

    def __init__(self, threshold: float = 0.0, *, enforce_enable: bool = False) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.threshold = threshold

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        return reference.fatrelu_and_mul(x, self.threshold)

    def extra_repr(self) -> str:
        return f"threshold={self.threshold}"


# Hugging Face's names of activations -> what makes one.
GATED_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "silu": SiluAndMul,
    "gelu": GeluAndMul,
    "gelu_pytorch_tanh": lambda: GeluAndMul("tanh"),
}
PLAIN_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": ReLU,
    "relu2": ReLUSquaredActivation,
    "gelu": GELU,
    "gelu_new": NewGELU,
    "gelu_pytorch_tanh": GELUTanh,
    "xielu": lambda: XIELU(dtype=torch.float32),
}
