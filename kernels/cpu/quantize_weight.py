"""Quantizing a float weight in C++, while it is loaded; `kernels/reference/quantize_weight.py` defines it."""

from __future__ import annotations

import torch

from llm.kernels.cpu.library import Library
from llm.kernels.cpu.signatures import KERNELS
from llm.kernels.cpu.tensors import KINDS
from llm.kernels.reference import quantize_weight as reference

_QUANTIZE = KERNELS["llm_quantize_weight"]


def quantize_weight(
    lib: Library,
    weight: torch.Tensor,
    bits: int,
    group_size: int,
    search: bool,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    """(q, scale, signal, noise) as the definition; the last two in another order of sums."""
    if weight.dtype not in KINDS:
        return reference.quantize_weight(weight, bits, group_size, search, out)
    rows, columns = weight.shape
    if columns % group_size:
        raise ValueError(f"groups of {group_size} do not divide {columns} columns")
    weight = weight.contiguous()
    q, scale = out or (torch.empty(rows, columns, dtype=torch.int8), torch.empty(rows, columns // group_size))
    if not (q.is_contiguous() and scale.is_contiguous() and q.shape == weight.shape and q.dtype == torch.int8):
        raise ValueError(f"q is contiguous int8 {list(weight.shape)}, got {q.dtype} {list(q.shape)}")
    energies = torch.zeros(rows, 2, dtype=torch.float64)
    high, threads = 2 ** (bits - 1) - 1, torch.get_num_threads()
    places = (weight.data_ptr(), q.data_ptr(), scale.data_ptr(), energies.data_ptr())
    if lib.call(_QUANTIZE, KINDS[weight.dtype], *places, rows, columns, high, group_size, int(search), threads):
        raise ValueError("holds NaN or infinite values and cannot be quantized")
    signal, noise = energies.sum(dim=0).tolist()
    return q, scale, signal, noise
