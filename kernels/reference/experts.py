"""The feed-forwards that each token chose, in plain PyTorch: a loop over the experts that some token chose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise

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

    Shapes: x float [N, H], topk_ids int64 [N, K], topk_weights float32 [N, K] -> [N, H] of the type of x; sums are
    float32.

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
    """The sum of `experts`, [N, width] of the type of x; each[e] computes what expert e makes of its tokens.

    Args:
        of_tokens: the context in which an expert computes these tokens.
    """
    products = x.new_empty(topk_ids.numel(), width)
    chosen, order = topk_ids.flatten().sort(stable=True)
    ends = expert_ends(chosen, len(each))
    if len(chosen) and (ends[0] or ends[-1] < len(chosen)):
        wrong = chosen[0] if ends[0] else chosen[-1]
        raise IndexError(f"expert ids must be in [0, {len(each)}), got {int(wrong)}")
    for expert, (start, end) in enumerate(pairwise(ends)):
        if start == end:
            continue
        places = order[start:end]
        tokens = places // topk_ids.shape[1]
        with nullcontext() if of_tokens is None else of_tokens(tokens):
            products[places] = each[expert](x[tokens])
    products = products.view(*topk_ids.shape, width)
    total = topk_weights.new_zeros(len(x), width)
    for slot in range(topk_ids.shape[1]):
        term = topk_weights[:, slot, None] * products[:, slot]
        total = total + term if slot else term
    return total.to(x.dtype)


def expert_ends(chosen: torch.Tensor, count: int) -> list[int]:
    """Sorted ids -> [count + 1], how many are below 0, 1, ... and `count`. A device is waited for."""
    limits = torch.arange(count + 1, dtype=chosen.dtype, device=chosen.device)
    ends: list[int] = torch.searchsorted(chosen, limits).tolist()
    return ends


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
