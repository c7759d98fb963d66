"""The experts that tokens chose, with the GEMMs and activations of this library; `kernels/reference/experts.py` defines
it."""

from __future__ import annotations

import torch

from llm.kernels.cpu.activation import gelu_and_mul, silu_and_mul
from llm.kernels.cpu.library import Library
from llm.kernels.cpu.linear import linear
from llm.kernels.reference.experts import gate_of, over_experts
from llm.kernels.weight import ExpertWeights


def experts(
    library: Library,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: ExpertWeights,
    activation: str = "silu",
    limit: float = 0.0,
) -> torch.Tensor:
    """x float32 [N, H], topk_ids int64 [N, K], topk_weights float32 [N, K] -> float32 [N, H]."""

    def gate(both: torch.Tensor) -> torch.Tensor:
        if activation == "silu":
            return silu_and_mul(library, both)
        if activation in ("gelu", "gelu_tanh"):
            return gelu_and_mul(library, both, "tanh" if activation == "gelu_tanh" else "none")
        return gate_of(activation, limit)(both)

    def expert(rows: torch.Tensor, gate_up: object, down: object) -> torch.Tensor:
        return linear(library, gate(linear(library, rows, gate_up)), down)

    return over_experts(x, topk_ids, topk_weights, weights, expert)
