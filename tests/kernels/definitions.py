"""What float products are, one rounding after the other, for the tests of kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from llm.kernels.cpu import library, linear, packed
from llm.kernels.weight import LEAST, Weight, fused_multiply_add


def chain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The definition of a float product: fused multiply-adds from +0 over k = 0 ... K-1."""
    out = torch.zeros(x.shape[0], weight.shape[0])
    for k in range(x.shape[1]):
        out = fused_multiply_add(x[:, k : k + 1], weight[:, k].float(), out)
    return out


def rounded_chain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The definition of a product of bfloat16 weights and rounded activations: the chain over k = 1, 0, 3, 2, ..."""
    k = x.shape[1]
    order = [i ^ 1 if i ^ 1 < k else i for i in range(k)]
    return chain(x.bfloat16().float()[:, order], weight[:, order])


def group_sums(lib: library.Library, x: torch.Tensor, weight: Weight) -> list[torch.Tensor]:
    """Of each group of k, the chain of x and the unscaled values times `factor_of`: [M, N] each."""
    values = unscaled(weight) * factor_of(weight)
    return [
        linear.linear(lib, x_part.contiguous(), packed.pack(lib, part.contiguous()))
        for x_part, part in zip(_by_group(x, weight), _by_group(values, weight), strict=True)
    ]


def scaled_sums(lib: library.Library, x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """The definition of a product with a weight that has scales, and float activations (gemm_weight_only.cpp)."""
    return add_groups(group_sums(lib, x, weight), x, weight)


def add_groups(sums: list[torch.Tensor], x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """`sums` of another weight with the same values may be shared."""
    out = torch.zeros(x.shape[0], weight.n)
    scale = weight.scales.float() * (1 / factor_of(weight))
    for group, (part, x_part) in enumerate(zip(sums, _by_group(x, weight), strict=True)):
        inputs = sum_of_inputs(x_part)[:, None]
        if weight.zero is not None:
            part = fused_multiply_add(inputs, -factor_of(weight) * weight.zero[:, group].float(), part)
        out = fused_multiply_add(part, scale[:, group], out)
        if weight.minimum is not None:
            least = torch.tensor(float(LEAST[weight.kind]))
            below = fused_multiply_add(least, weight.scales[:, group].float(), -weight.minimum[:, group].float())
            out = fused_multiply_add(inputs, below, out)
    return out


def unscaled(weight: Weight) -> torch.Tensor:
    """What is multiplied by scales, [N, K]: integers or values of a table."""
    values = weight.unpack()
    if weight.table is not None:
        return weight.table[values.long() + 8]
    return values.float()


def factor_of(weight: Weight) -> float:
    """The power of two that kernels multiply values by, and divide scales by."""
    return 2.0**-8 if weight.kind == "float8" else 2.0**24


def sum_of_inputs(x: torch.Tensor) -> torch.Tensor:
    """[M, size] -> [M]: 16 sums side by side, then their tree."""
    total = torch.zeros(len(x), 16)
    for part in F.pad(x, (0, -x.shape[1] % 16)).split(16, dim=1):
        total = total + part
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total[:, 0]


def _by_group(values: torch.Tensor, weight: Weight) -> tuple[torch.Tensor, ...]:
    return values.split(weight.group_size or weight.k, dim=1) if weight.k else ()
