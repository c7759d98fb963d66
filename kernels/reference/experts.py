"""Experts of a mixture in plain PyTorch: which a token goes to, with what weights, and the weighted sum of those."""

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

_LEAST_SUM = 1e-20


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
    """The `top_k` experts of each token: float32 [N, E] -> (weights float32 [N, K], ids int64 [N, K]).

    Scores are the softmax or the sigmoid of the logits. Experts are chosen by score plus `bias` (float32 [E]), in
    falling order, of equal ones the lower ids first. With `groups` runs of E / groups experts only those in the
    `topk_groups` best groups can be chosen; a group counts as its best expert (DeepSeek V2, arXiv:2405.04434), with a
    bias as the sum of its two best (DeepSeek V3, arXiv:2412.19437).

    A weight is the expert's score without the bias, divided by the sum of the chosen ones with `renormalize`, times
    `scale`. A row with a NaN gets the ids 0 to K - 1 and weights of NaN.
    """
    check_routing(logits.shape[-1], top_k, scoring, bias, groups, topk_groups)
    logits = logits.float()
    scores = logits.softmax(dim=-1) if scoring == "softmax" else logits.sigmoid()
    return chosen_by(scores, top_k, renormalize, bias, groups, topk_groups, scale)


def chosen_by(
    scores: torch.Tensor,
    top_k: int,
    renormalize: bool,
    bias: torch.Tensor | None,
    groups: int,
    topk_groups: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`select_experts` by the scores float32 [N, E], in which no sum is over more than the chosen experts."""
    choice = scores if bias is None else scores + bias
    unknown = choice.isnan().any(dim=-1, keepdim=True)
    if groups > 1:
        choice = _in_best_groups(choice, groups, topk_groups, 1 if bias is None else 2)
    ids = choice.masked_fill(unknown, 0.0).sort(dim=-1, descending=True, stable=True).indices[:, :top_k].contiguous()
    weights = scores.gather(1, ids).masked_fill_(unknown, torch.nan)
    if renormalize:
        total = weights[:, :1].clone()
        for slot in range(1, top_k):
            total += weights[:, slot : slot + 1]
        weights /= total.clamp(min=_LEAST_SUM)
    return weights * scale, ids


def mix_two_experts(logits: torch.Tensor, jitter_eps: float = 0.01) -> tuple[torch.Tensor, torch.Tensor]:
    """SparseMixer (arXiv:2409.12136) when nothing is trained: float32 [N, E] -> (weights [N, 2], int64 ids [N, 2]).

    The best expert, of equal ones the lower id, has its share of a softmax for a weight; then the best of the others,
    without the first. A softmax is over the experts left whose distance to the best is at most 2 `jitter_eps` of the
    larger magnitude, so weights do not sum to 1. A row with a NaN gets the ids 0 and 1 and weights of NaN.
    """
    check_mixed(logits.shape[-1])
    logits = logits.float()
    unknown = logits.isnan().any(dim=-1, keepdim=True)
    known = left = logits.masked_fill(unknown, 0.0)
    slots = []
    for _ in range(2):
        best = left.sort(dim=-1, descending=True, stable=True).indices[:, :1]
        top = known.gather(1, best)
        is_far = (top - known) / torch.maximum(known.abs(), top) > 2 * jitter_eps
        slots.append((left.masked_fill(is_far, -torch.inf).softmax(dim=-1).gather(1, best), best))
        left = left.scatter(1, best, -torch.inf)
    weights, ids = (torch.cat(parts, dim=1) for parts in zip(*slots, strict=True))
    return weights.masked_fill(unknown, torch.nan), ids


def check_mixed(experts: int) -> None:
    if experts < 2:
        raise ValueError(f"two of {experts} experts cannot be chosen")


def check_routing(
    experts: int, top_k: int, scoring: str, bias: torch.Tensor | None, groups: int, topk_groups: int
) -> None:
    """Raises ValueError for numbers that do not fit each other."""
    if scoring not in ("softmax", "sigmoid"):
        raise ValueError(f"experts are scored by softmax or sigmoid, got {scoring!r}")
    if not 1 <= topk_groups <= groups or experts % groups:
        raise ValueError(f"{topk_groups} of {groups} groups of {experts} experts cannot be chosen")
    if not 1 <= top_k <= experts // groups * topk_groups:
        raise ValueError(f"{top_k} of {experts // groups * topk_groups} experts cannot be chosen")
    if bias is not None and bias.shape != (experts,):
        raise ValueError(f"one bias per expert is needed, [{experts}], got {list(bias.shape)}")


def _in_best_groups(choice: torch.Tensor, groups: int, topk_groups: int, counted: int) -> torch.Tensor:
    """The scores that experts are chosen by, -inf outside of the best groups."""
    parts = choice.unflatten(-1, (groups, choice.shape[-1] // groups))
    totals = parts.sort(dim=-1, descending=True).values[..., :counted].sum(dim=-1)
    best = totals.sort(dim=-1, descending=True, stable=True).indices[:, :topk_groups]
    allowed = torch.zeros_like(totals, dtype=torch.bool).scatter_(1, best, True)
    return parts.masked_fill(~allowed.unsqueeze(-1), -torch.inf).view_as(choice)


# --- Experts. ---

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
