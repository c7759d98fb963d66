"""The weighted sum of the experts that each token chose, in one call; `kernels/reference/experts.py` defines it."""

from __future__ import annotations

import torch

from llm.kernels.cpu.library import Library
from llm.kernels.cpu.packed import WeightArray, panels
from llm.kernels.cpu.signatures import KERNELS
from llm.kernels.reference.activation import SWIGLUOAI_LIMIT
from llm.kernels.reference.experts import check_gate
from llm.kernels.weight import ExpertWeights

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
