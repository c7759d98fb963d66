"""The feed-forwards that each token chose, in plain PyTorch: a loop over the experts that some token chose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from llm.kernels.reference.activation import (
    SWIGLUOAI_ALPHA,
    SWIGLUOAI_LIMIT,
    gelu_and_mul,
    relu2,
    silu_and_mul,
    silu_and_mul_with_clamp,
)
from llm.kernels.reference.linear import linear
from llm.kernels.weight import ExpertWeights, Weight

Gate = Callable[[torch.Tensor], torch.Tensor]
# Activations of experts without a gate, as vLLM spells them: y is down_e(act(up_e(x))).
UNGATED = ("relu2_no_mul",)


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
            within +-limit. "relu2_no_mul", of experts without a gate: the square of what is positive.
        limit: of "swigluoai"; 0: 7.

    Raises:
        IndexError: an id that is none.
        ValueError: an unknown activation, or one that needs a gate that the experts lack.
    """
    check_gate(activation, weights)
    gate = gate_of(activation, limit)

    def compute(gate_up: Weight, down: Weight, rows: torch.Tensor) -> torch.Tensor:
        return linear(gate(linear(rows, gate_up)), down)

    each = [partial(compute, *pair) for pair in zip(weights.gate_up, weights.down, strict=True)]
    return over_experts(x, topk_ids, topk_weights, each, weights.hidden_size)


def over_experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    each: Sequence[Callable[[torch.Tensor], torch.Tensor]],
    width: int,
    of_tokens: Callable[[torch.Tensor], AbstractContextManager[None]] | None = None,
) -> torch.Tensor:
    """The sum of `experts`, float32 [N, width]; each[e] computes what expert e makes of its tokens.

    Args:
        of_tokens: the context in which an expert computes these tokens.
    """
    products = x.new_empty(*topk_ids.shape, width)
    for expert in topk_ids.unique().tolist():
        if not 0 <= expert < len(each):
            raise IndexError(f"expert ids must be in [0, {len(each)}), got {expert}")
        tokens, slots = (topk_ids == expert).nonzero(as_tuple=True)
        with nullcontext() if of_tokens is None else of_tokens(tokens):
            products[tokens, slots] = each[expert](x[tokens])
    total = x.new_zeros(len(x), width)
    for slot in range(topk_ids.shape[1]):
        term = topk_weights[:, slot, None] * products[:, slot]
        total = total + term if slot else term
    return total


def gate_of(activation: str, limit: float) -> Gate:
    """What is between an expert's two products: float32 [..., 2I], or [..., I] without a gate, -> [..., I]."""
    gates: dict[str, Gate] = {
        "silu": silu_and_mul,
        "gelu": lambda x: gelu_and_mul(x, "none"),
        "gelu_tanh": lambda x: gelu_and_mul(x, "tanh"),
        "swigluoai": lambda x: silu_and_mul_with_clamp(x, limit or SWIGLUOAI_LIMIT, SWIGLUOAI_ALPHA, 1.0),
        "relu2_no_mul": relu2,
    }
    if activation not in gates:
        raise ValueError(f"experts have the activations {', '.join(gates)}, got {activation!r}")
    return gates[activation]


def check_gate(activation: str, weights: ExpertWeights) -> None:
    """ValueError where the experts have a gate that the activation does not read, or lack it."""
    if weights.is_gated == (activation in UNGATED):
        what = "are of experts with a gate" if weights.is_gated else "are of experts without a gate"
        raise ValueError(f"the activation {activation!r} does not fit: the weights {what}")
