"""The feed-forwards that each token chose, in plain PyTorch: a loop over the experts that some token chose."""

from __future__ import annotations

from collections.abc import Callable

import torch

from llm.kernels.reference.activation import gelu_and_mul, silu_and_mul, silu_and_mul_with_clamp
from llm.kernels.reference.linear import linear
from llm.kernels.weight import ExpertWeights, Weight

# Of the gate's sigmoid in `swigluoai`.
_ALPHA = 1.702
_LIMIT = 7.0

Gate = Callable[[torch.Tensor], torch.Tensor]


def experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: ExpertWeights,
    activation: str = "silu",
    limit: float = 0.0,
) -> torch.Tensor:
    """y[i] = sum over slots j of topk_weights[i, j] * down_e(act(gate_up_e(x[i]))) with e = topk_ids[i, j].

    The first product starts the sum, and the others follow in the order of the slots, each by one multiplication and
    one addition.

    Shapes: x float32 [N, H], topk_ids int64 [N, K], topk_weights float32 [N, K] -> float32 [N, H].

    Args:
        topk_ids: a token's experts, each at most once.
        activation: "silu", "gelu", "gelu_tanh" or "swigluoai": g sigmoid(1.702 g) (u + 1), g = min(gate, limit), u = up
            within +-limit.
        limit: of "swigluoai"; 0: 7.

    Raises:
        IndexError: an id that is none.
    """
    gate = gate_of(activation, limit)

    def expert(rows: torch.Tensor, gate_up: Weight, down: Weight) -> torch.Tensor:
        return linear(gate(linear(rows, gate_up)), down)

    return over_experts(x, topk_ids, topk_weights, weights, expert)


def over_experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: ExpertWeights,
    expert: Callable[[torch.Tensor, Weight, Weight], torch.Tensor],
) -> torch.Tensor:
    """The sum of `experts`; `expert` is what one computes of its tokens, from its two weights."""
    products = x.new_empty(*topk_ids.shape, weights.hidden_size)
    for index in topk_ids.unique().tolist():
        if not 0 <= index < len(weights.down):
            raise IndexError(f"expert ids must be in [0, {len(weights.down)}), got {index}")
        tokens, slots = (topk_ids == index).nonzero(as_tuple=True)
        products[tokens, slots] = expert(x[tokens], weights.gate_up[index], weights.down[index])
    total = x.new_zeros(len(x), weights.hidden_size)
    for slot in range(topk_ids.shape[1]):
        term = topk_weights[:, slot, None] * products[:, slot]
        total = total + term if slot else term
    return total


def gate_of(activation: str, limit: float) -> Gate:
    """What is between an expert's two products: float32 [..., 2I] -> [..., I]."""
    gates: dict[str, Gate] = {
        "silu": silu_and_mul,
        "gelu": lambda x: gelu_and_mul(x, "none"),
        "gelu_tanh": lambda x: gelu_and_mul(x, "tanh"),
        "swigluoai": lambda x: silu_and_mul_with_clamp(x, limit or _LIMIT, _ALPHA, 1.0),
    }
    if activation not in gates:
        raise ValueError(f"experts have the activations {', '.join(gates)}, got {activation!r}")
    return gates[activation]
