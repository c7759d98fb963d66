"""Experts of a mixture in C++: which a token goes to, and the weighted sum of those; `kernels/reference/experts.py`
defines them."""

from __future__ import annotations

import torch

from llm.kernels.cpu.library import Library, as_float32, pointer
from llm.kernels.cpu.packed import WeightArray, panels
from llm.kernels.cpu.signatures import KERNELS
from llm.kernels.reference.activation import SWIGLUOAI_LIMIT
from llm.kernels.reference.experts import check_gate, check_mixed, check_routing
from llm.kernels.weight import ExpertWeights

_SELECT = KERNELS["llm_select_experts"]
_MIX = KERNELS["llm_mix_two_experts"]


def select_experts(
    library: Library,
    logits: torch.Tensor,
    top_k: int,
    scoring: str = "softmax",
    renormalize: bool = True,
    bias: torch.Tensor | None = None,
    groups: int = 1,
    topk_groups: int = 1,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [N, E] -> (weights float32 [N, K], ids int64 [N, K])."""
    check_routing(logits.shape[-1], top_k, scoring, bias, groups, topk_groups)
    logits = as_float32(logits)
    bias = None if bias is None else as_float32(bias)
    rows, width = logits.shape
    weights, ids = library.empty(rows, top_k), torch.empty(rows, top_k, dtype=torch.int64)
    library.call(
        *(_SELECT, logits.data_ptr(), pointer(bias), weights.data_ptr(), ids.data_ptr(), rows, width, top_k),
        *(scoring == "sigmoid", renormalize, groups, topk_groups, scale, torch.get_num_threads()),
    )
    if library.recorder is not None:
        library.recorder.kept.append(bias)
    return weights, ids


def mix_two_experts(
    library: Library, logits: torch.Tensor, jitter_eps: float = 0.01
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [N, E] -> (weights float32 [N, 2], ids int64 [N, 2])."""
    check_mixed(logits.shape[-1])
    logits = as_float32(logits)
    rows, width = logits.shape
    weights, ids = library.empty(rows, 2), torch.empty(rows, 2, dtype=torch.int64)
    library.call(
        *(_MIX, logits.data_ptr(), weights.data_ptr(), ids.data_ptr(), rows, width),
        *(2 * jitter_eps, torch.get_num_threads()),
    )
    return weights, ids


# --- Experts. ---

# As in activation.h and experts.cpp.
_FUNCTIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "swigluoai": 6, "relu2_no_mul": 5}
_EXPERTS = KERNELS["llm_experts"]
_BAD_ID, _NO_SCALES = 1, 2


def experts(
    library: Library,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: ExpertWeights,
    activation: str = "silu",
    limit: float = 0.0,
) -> torch.Tensor:
    """x float32 [N, H], topk_ids int64 [N, K], topk_weights float32 [N, K] -> float32 [N, H].

    An expert's weights are read once for all of its tokens, and those of other experts are not read. A row's bits are
    those of `linear` and the activation for it alone, and of one product and one sum for each slot, in order.
    """
    if activation not in _FUNCTIONS:
        raise ValueError(f"experts have the activations {', '.join(_FUNCTIONS)}, got {activation!r}")
    check_gate(activation, weights)
    _check(x, topk_ids, topk_weights, weights.hidden_size)
    x, topk_ids, topk_weights = x.contiguous(), topk_ids.contiguous(), topk_weights.contiguous()
    out = library.empty(*x.shape)
    gate_up, down = weights.derived(_arrays)
    result = library.call(
        _EXPERTS,
        *(gate_up.address, down.address, len(weights.down), x.data_ptr(), topk_ids.data_ptr(), topk_weights.data_ptr()),
        *(*topk_ids.shape, _FUNCTIONS[activation], limit or SWIGLUOAI_LIMIT, out.data_ptr(), torch.get_num_threads()),
    )
    if result == _BAD_ID:
        lowest, highest = int(topk_ids.min()), int(topk_ids.max())
        raise IndexError(f"expert ids must be in [0, {len(weights.down)}), got {lowest} to {highest}")
    if result == _NO_SCALES:
        each = (*weights.gate_up, *weights.down)
        kind = next(weight.kind for weight in each if weight.scale is None and not weight.is_float)
        raise ValueError(f"a weight of {kind} needs its scales")
    if library.recorder is not None:
        library.recorder.kept.append(weights)
    return out


def _check(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, hidden: int) -> None:
    if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] != hidden:
        raise ValueError(f"activations are float32 [N, {hidden}], got {x.dtype} {list(x.shape)}")
    if ids.dtype != torch.int64 or ids.dim() != 2 or len(ids) != len(x):
        raise ValueError(f"expert ids are int64 [{len(x)}, K], got {ids.dtype} {list(ids.shape)}")
    if weights.dtype != torch.float32 or weights.shape != ids.shape:
        raise ValueError(f"expert weights are float32 {list(ids.shape)}, got {weights.dtype} {list(weights.shape)}")


def _arrays(weights: ExpertWeights) -> tuple[WeightArray, WeightArray]:
    return WeightArray(panels(weights.gate_up)), WeightArray(panels(weights.down))
