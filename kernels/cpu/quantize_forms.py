"""Quantizing a float weight to other forms than plain integers in C++; `kernels/reference/quantize_forms.py` defines
it."""

from __future__ import annotations

import torch

from llm.kernels.cpu.library import Library
from llm.kernels.cpu.quantize_weight import number_of, quantize_into
from llm.kernels.cpu.tensors import KINDS
from llm.kernels.reference import quantize_forms as reference


def quantize_weight_as(
    lib: Library,
    weight: torch.Tensor,
    form: str,
    group_size: int,
    out: reference.Parts | None = None,
    rotation: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, float, float]:
    """(q, scale, minimum, signal, noise) as the definition; the last two in another order of sums."""
    if weight.dtype not in KINDS or (rotation and form != "two_levels"):
        return reference.quantize_weight_as(weight, form, group_size, out, rotation)
    rows, columns = weight.shape
    q, scale, minimum = out or reference.empty(form, rows, columns, group_size)
    table = torch.tensor(reference.NF4) if form == "nf4" else None
    if form == "q4_k" and columns % reference.SUPER_BLOCK:
        raise ValueError(f"blocks of {reference.SUPER_BLOCK} do not divide {columns} columns")
    signal, noise = quantize_into(lib, weight, number_of(form), group_size, q, scale, minimum, table, rotation=rotation)
    return q, scale, minimum, signal, noise
