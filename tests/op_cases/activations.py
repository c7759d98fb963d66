"""Activations. Wide enough for a vector body and a tail; three deviations, so that the clamps act."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from llm.layers import activation
from llm.layers import activation as extra_activation
from op_cases.base import Case, tensors

WIDTH = 2 * 37
ACTIVATION_INPUT = tensors(WIDTH, scale=3.0)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))


def erf_gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def transformers_activation(name: str) -> Callable[..., torch.Tensor]:
    """transformers.activations.ACT2FN[name], in float64."""

    def reference(op: Any, x: torch.Tensor) -> torch.Tensor:
        from transformers.activations import ACT2FN

        return ACT2FN[name](x)

    return reference


def gated_transformers_activation(name: str) -> Callable[..., torch.Tensor]:
    """transformers.activations.ACT2FN[name] of the first half times the second, in float64."""

    def reference(op: Any, x: torch.Tensor) -> torch.Tensor:
        gate, up = split(x)
        return transformers_activation(name)(op, gate) * up

    return reference


def xielu_reference(op: Any, x: torch.Tensor) -> torch.Tensor:
    """transformers.activations.XIELUActivation with our parameters."""
    from transformers.activations import XIELUActivation

    module = XIELUActivation(beta=op.beta.item(), eps=op.eps, dtype=torch.float64)
    module.alpha_p.data.copy_(op.alpha_p)
    module.alpha_n.data.copy_(op.alpha_n)
    return module._xielu_python(x).detach()


def gpt_oss_reference(op: Any, x: torch.Tensor) -> torch.Tensor:
    """GptOssExperts._apply_gate of transformers."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    return GptOssExperts._apply_gate(op, x)


def gemma3n_reference(op: Any, x: torch.Tensor) -> torch.Tensor:
    """Gemma3nTextMLP._gaussian_topk of transformers, then gelu; its quantile is float32."""
    from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP

    gate, up = split(x)
    if not x.numel():
        return up
    holder = nn.Module()
    holder.activation_sparsity = 0.5 * (1 + math.erf(op.std_multiplier / math.sqrt(2)))
    kept = Gemma3nTextMLP._gaussian_topk(holder, gate)
    return nn.functional.gelu(kept, approximate=op.approximate) * up


def clamped_reference(op: Any, x: torch.Tensor) -> torch.Tensor:
    gate, up = split(x)
    gate = torch.minimum(gate, torch.tensor(op.swiglu_limit))
    up = torch.maximum(torch.minimum(up, torch.tensor(op.swiglu_limit)), torch.tensor(-op.swiglu_limit))
    return gate * sigmoid(op.alpha * gate) * (up + op.beta)


def step_reference(op: Any, x: torch.Tensor) -> torch.Tensor:
    gate, up = split(x)
    gate = torch.minimum(gate * sigmoid(gate), torch.tensor(op.limit))
    return gate * torch.maximum(torch.minimum(up, torch.tensor(op.limit)), torch.tensor(-op.limit))


def act(build: Callable[[torch.dtype], nn.Module], reference: Callable[..., Any], **more: Any) -> Case:
    return Case(build, ACTIVATION_INPUT, reference, **more)


ACTIVATIONS: dict[str, list[Case]] = {
    "silu_and_mul": [act(lambda _: activation.SiluAndMul(), gated_transformers_activation("silu"))],
    "mul_and_silu": [
        act(lambda _: extra_activation.MulAndSilu(), lambda op, x: split(x)[0] * split(x)[1] * sigmoid(split(x)[1]))
    ],
    "gelu_and_mul": [
        act(lambda _: activation.GeluAndMul(), lambda op, x: erf_gelu(split(x)[0]) * split(x)[1]),
        act(lambda _: activation.GeluAndMul("tanh"), gated_transformers_activation("gelu_pytorch_tanh")),
    ],
    "gelu_and_mul_sparse": [
        act(lambda _: activation.GeluAndMulSparse(0.95), gemma3n_reference),
        act(lambda _: activation.GeluAndMulSparse(0.3, "tanh"), gemma3n_reference),
    ],
    "gelu": [act(lambda _: activation.GELU(), lambda op, x: erf_gelu(x))],
    "gelu_tanh": [act(lambda _: activation.GELUTanh(), transformers_activation("gelu_pytorch_tanh"))],
    "gelu_new": [act(lambda _: activation.NewGELU(), transformers_activation("gelu_new"))],
    "gelu_fast": [act(lambda _: extra_activation.FastGELU(), transformers_activation("gelu_fast"))],
    "quick_gelu": [act(lambda _: activation.QuickGELU(), transformers_activation("quick_gelu"))],
    "relu": [act(lambda _: activation.ReLU(), transformers_activation("relu"))],
    "relu2": [act(lambda _: activation.ReLUSquaredActivation(), transformers_activation("relu2"))],
    "xielu": [act(lambda dtype: activation.XIELU(dtype=dtype), xielu_reference)],
    "swigluoai_and_mul": [act(lambda _: extra_activation.SwigluOAIAndMul(), gpt_oss_reference)],
    "silu_and_mul_with_clamp": [
        act(lambda _: extra_activation.SiluAndMulWithClamp(2.0), clamped_reference),
        act(lambda _: extra_activation.SiluAndMulWithClamp(7.0, alpha=1.702, beta=1.0), clamped_reference),
    ],
    "swiglustep_and_mul": [act(lambda _: extra_activation.SwigluStepAndMul(2.0), step_reference)],
    "fatrelu_and_mul": [
        act(
            lambda _: extra_activation.FatreluAndMul(0.5),
            lambda op, x: torch.where(split(x)[0] > op.threshold, split(x)[0], 0.0) * split(x)[1],
        )
    ],
}
