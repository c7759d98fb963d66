"""Experts: which ones a token goes to, and their weighted sum.

The tokens of an expert are multiplied together, by the GEMMs of linear layers; their products are added in the order of
a token's slots, by no atomic operation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from llm.kernels.reference.activation import SWIGLUOAI_ALPHA, SWIGLUOAI_LIMIT, relu2, silu_and_mul_with_clamp
from llm.kernels.reference.experts import check_gate, check_routing, chosen_by, gate_of, over_experts
from llm.kernels.triton.elementwise import gelu_and_mul, silu_and_mul
from llm.kernels.triton.gemm import linear
from llm.kernels.triton.vocabulary import log_softmax
from llm.kernels.weight import ExpertWeights, Weight


def select_experts(
    logits: torch.Tensor,
    top_k: int,
    scoring: str = "softmax",
    renormalize: bool = True,
    bias: torch.Tensor | None = None,
    groups: int = 1,
    topk_groups: int = 1,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels/reference/experts.py`."""
    check_routing(logits.shape[-1], top_k, scoring, bias, groups, topk_groups)
    logits = logits.float()
    scores = log_softmax(logits).exp() if scoring == "softmax" else logits.sigmoid()
    return chosen_by(scores, top_k, renormalize, bias, groups, topk_groups, scale)


def experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: ExpertWeights,
    activation: str = "silu",
    limit: float = 0.0,
) -> torch.Tensor:
    """See `kernels/reference/experts.py`."""
    check_gate(activation, weights)
    gates: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "silu": silu_and_mul,
        "gelu": partial(gelu_and_mul, approximate="none"),
        "gelu_tanh": partial(gelu_and_mul, approximate="tanh"),
        "swigluoai": lambda x: silu_and_mul_with_clamp(x, limit or SWIGLUOAI_LIMIT, SWIGLUOAI_ALPHA, 1.0),
        "relu2_no_mul": relu2,
    }
    gate = gates.get(activation) or gate_of(activation, limit)

    def compute(gate_up: Weight, down: Weight, rows: torch.Tensor) -> torch.Tensor:
        return linear(gate(linear(rows, gate_up)), down)

    each = [partial(compute, *pair) for pair in zip(weights.gate_up, weights.down, strict=True)]
    return over_experts(x, topk_ids, topk_weights, each, weights.hidden_size)
