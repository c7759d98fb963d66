"""Matrix products with weights in their storage type and float32 activations and accumulation."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from llm.kernels.reference.quantized import PackedWeight

# Rows of a bf16 or fp16 weight are widened this many elements at a time, so that the float32 copy stays in the cache.
_WIDEN_ELEMENTS = 1 << 20


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """y = x W^T + bias.

    Shapes: x float32 [..., K], weight [N, K] of any floating type, bias [N] or None, y float32 [..., N].
    """
    bias = None if bias is None else bias.to(x.dtype)
    if weight.dtype == x.dtype:
        return F.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    out = rows.new_empty(rows.shape[0], weight.shape[0])
    step = max(1, _WIDEN_ELEMENTS // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        torch.mm(rows, weight[start : start + step].to(x.dtype).t(), out=out[:, start : start + step])
    if bias is not None:
        out += bias
    return out.view(*x.shape[:-1], weight.shape[0])


def embedding(token_ids: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of weight [V, H] for ids [N] -> dtype [N, H]."""
    return F.embedding(token_ids, weight).to(dtype)


def linear_float(x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`linear` with a weight of `pack_float`, of x rounded to bfloat16 where the weight says so."""
    return linear(rounded(x) if packed.rounds_input else x, packed.unpack(), bias)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """float32 -> the nearest bfloat16, in float32."""
    return x.bfloat16().float()


def embedding_float(token_ids: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
    """`embedding` in float32, from a table of `pack_float`."""
    return embedding(token_ids, packed.unpack(), torch.float32)
