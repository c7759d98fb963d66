"""Quantization of activations in C++, as separate operations; GEMMs quantize their activations themselves.

`kernels/reference/quantized.py` defines the functions, and these give the same bits.
"""

from __future__ import annotations

import torch

from llm.kernels.cpu.library import Library
from llm.kernels.cpu.signatures import KERNELS

_PER_TOKEN = KERNELS["llm_quantize_per_token"]
_STATIC = KERNELS["llm_quantize_static"]


def quantize_per_token(lib: Library, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x float32 [M, K] -> q int8 [M, K], scale float32 [M]: the largest magnitude of each row becomes 127."""
    x = _checked(x)
    q, scale = torch.empty(x.shape, dtype=torch.int8), x.new_empty(x.shape[:-1])
    threads = torch.get_num_threads()
    lib.call(_PER_TOKEN, x.data_ptr(), q.data_ptr(), scale.data_ptr(), scale.numel(), x.shape[-1], threads)
    return q, scale


def quantize_static(lib: Library, x: torch.Tensor, scale: float, offset: int) -> torch.Tensor:
    """clamp(round(x / scale) + offset, -128, 127); float32 -> int8 of the same shape."""
    x = _checked(x)
    q = torch.empty(x.shape, dtype=torch.int8)
    lib.call(_STATIC, x.data_ptr(), q.data_ptr(), scale, offset, x.numel(), torch.get_num_threads())
    return q


def _checked(x: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.float32:
        raise ValueError(f"activations are float32, got {x.dtype}")
    return x.contiguous()
