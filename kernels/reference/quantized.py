"""Quantization of activations, and exact integer GEMMs, in plain PyTorch.

Owns the definitions; `kernels/cpu` gives the same bits. M rows (tokens), N outputs, K inputs.
"""

from __future__ import annotations

import torch

from llm.kernels.weight import Weight

# An integer GEMM runs as float32 GEMMs over this many k at a time: 1024 * 128 * 128 = 2**24, so every partial sum is
# exact in any order. (torch._int_mm saturates on processors whose int8 instructions do.)
_EXACT_K = 1024
# Weights are converted to float32 this many elements at a time, so that the copy stays in the cache.
_WIDEN_ELEMENTS = 1 << 20
_WIDEN_ON_DEVICE = 1 << 26


def quantize_per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row by its largest element.

    scale = max|x| / 127 and q = clamp(round_half_even(x / scale), -128, 127); a row whose scale is 0 has q = 0. A NaN
    or infinity in a row makes its scale NaN or infinite, and then all outputs of the row are NaN.

    Shapes: x float32 [M, K] -> q int8 [M, K], scale float32 [M].
    """
    scale = x.abs().amax(dim=-1) / 127.0 if x.shape[-1] else x.new_zeros(x.shape[0])
    divisor = torch.where(scale == 0, torch.ones_like(scale), scale)
    return _to_int8(x / divisor[:, None]), scale


def quantize_static(x: torch.Tensor, scale: float, offset: int) -> torch.Tensor:
    """q = clamp(round_half_even(x / scale) + offset, -128, 127) with the float32 value of `scale`; float32 -> int8."""
    return _to_int8(torch.round(x / torch.tensor(scale, dtype=torch.float32)) + offset)


def int_matmul(q: torch.Tensor, weight: Weight, start: int = 0, end: int | None = None) -> torch.Tensor:
    """sum over k in [start, end) of q[m, k] * w[n, k], exact in int32; q int8 [M, K] -> [M, N]."""
    end = weight.k if end is None else end
    out = q.new_zeros(q.shape[0], weight.n, dtype=torch.int32)
    step = rows_at_once(weight.k, q.device)
    for row in range(0, weight.n, step):
        w = weight.integers(row, min(row + step, weight.n))
        for k in range(start, end, _EXACT_K):
            last = min(k + _EXACT_K, end)
            out[:, row : row + step] += (q[:, k:last].float() @ w[:, k:last].float().t()).to(torch.int32)
    return out


def row_sums(weight: Weight) -> torch.Tensor:
    """sum_k w[n, k], int32 [N]."""
    return weight.integers(0, weight.n).sum(dim=1, dtype=torch.int32)


def rows_at_once(columns: int, device: torch.device) -> int:
    """Rows of a weight that are converted to float32 at a time."""
    most = _WIDEN_ELEMENTS if device.type == "cpu" else _WIDEN_ON_DEVICE
    return max(1, most // max(1, columns))


def _to_int8(x: torch.Tensor) -> torch.Tensor:
    return torch.round(x).nan_to_num_(nan=0.0).clamp_(-128, 127).to(torch.int8)
