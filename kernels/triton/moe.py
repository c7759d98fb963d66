"""Experts: which ones a token goes to, and their weighted sum.

Slots of tokens are sorted by expert on the device, and one launch multiplies those of all experts: the host reads
nothing. A token's products are added in the order of its slots, by no atomic operation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

import triton
import triton.language as tl
from llm.kernels.reference.activation import SWIGLUOAI_ALPHA, SWIGLUOAI_LIMIT, relu2, silu_and_mul_with_clamp
from llm.kernels.reference.experts import check_gate, check_routing, chosen_by, gate_of, over_experts
from llm.kernels.triton.elementwise import gelu_and_mul, silu_and_mul
from llm.kernels.triton.gemm import Together, form_of, linear, multiply_experts, together
from llm.kernels.triton.language import rounded
from llm.kernels.triton.launch import launch
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
    # PyTorch's sigmoid has other bits for the last values of a tensor where the interpreter runs, on a CPU.
    scores = log_softmax(logits).exp() if scoring == "softmax" else 1.0 / (1.0 + (-logits).exp())
    return chosen_by(scores, top_k, renormalize, bias, groups, topk_groups, scale)


@triton.jit
def add_slots(products, ids, weights, y, N, experts, SLOTS: tl.constexpr, BN: tl.constexpr):
    """y[t] = sum of weights[t, j] * products[t, j], from j = 0 on. An id that is none makes the row NaN."""
    row = tl.program_id(0).to(tl.int64)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BN,), tl.float32)
    for slot in range(SLOTS):
        at = row * SLOTS + slot
        expert = tl.load(ids + at)
        factor = tl.where((expert >= 0) & (expert < experts), tl.load(weights + at), float("nan"))
        term = factor * tl.load(products + at * N + rn, mask=rn < N, other=0.0).to(tl.float32)
        total = total + term if slot else term
    tl.store(y + row * N + rn, rounded(total, y.dtype.element_ty), mask=rn < N)


def _add_slots(products: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: int) -> torch.Tensor:
    """Products [T * K, N], ids and weights [T, K] -> [T, N] of the type of the products."""
    tokens, slots = ids.shape
    width = products.shape[1]
    out = torch.empty(tokens, width, dtype=products.dtype, device=products.device)
    launch(
        add_slots, (tokens, -(-width // 512)), products, ids.contiguous(), weights.float().contiguous(), out, width,
        experts, SLOTS=slots, BN=512, device=out.device, num_warps=4,
    )  # fmt: skip
    return out


def _together(weights: ExpertWeights) -> tuple[Together | None, Together | None]:
    return together(weights.gate_up), together(weights.down)


def experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: ExpertWeights,
    activation: str = "silu",
    limit: float = 0.0,
) -> torch.Tensor:
    """See `kernels/reference/experts.py`. An id that is none makes its token's row NaN: the host does not look.

    Weights of several forms are multiplied with one expert after the other, and the host waits for their numbers.
    """
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

    first, second = weights.derived(_together)
    forms = [part and form_of(part.first, x.dtype) for part in (first, second)]
    if first and second and forms[0] and forms[1] and topk_ids.numel():
        chosen, order = topk_ids.flatten().sort(stable=True)
        count = len(weights.down)
        starts = torch.searchsorted(chosen, torch.arange(count + 1, device=x.device), out_int32=True)
        inner = gate(multiply_experts(x, first, forms[0], starts, order, topk_ids.shape[1]))
        return _add_slots(multiply_experts(inner, second, forms[1], starts, order, 0), topk_ids, topk_weights, count)
    each = [partial(compute, *pair) for pair in zip(weights.gate_up, weights.down, strict=True)]
    return over_experts(x, topk_ids, topk_weights, each, weights.hidden_size)
