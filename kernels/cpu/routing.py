"""Which experts a token goes to, in C++; `kernels/reference/routing.py` defines it."""

from __future__ import annotations

import torch

from llm.kernels.cpu.library import Library
from llm.kernels.cpu.signatures import KERNELS
from llm.kernels.cpu.tensors import as_float32, pointer
from llm.kernels.reference.routing import check_mixed, check_routing

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
