"""quant_fp8: values are the nearest 8-bit floats times the scale of their group, which is made for its largest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from llm.layers.quant_fp8 import PER_CHANNEL, PER_TENSOR, PER_TOKEN, QuantFP8
from op_cases.base import Case, Inputs, normal

WIDTH = 48
LARGEST = 448.0
# Every finite float8_e4m3fn, by its bits: sign, four bits of exponent (bias 7), three of mantissa.
GRID = torch.tensor(
    sorted(
        {
            sign * (bits % 8 / 8 + (bits >= 8)) * 2.0 ** (max(bits // 8, 1) - 7)
            for bits in range(127)
            for sign in (-1.0, 1.0)
        }
    ),
    dtype=torch.float64,
)


def spread(shape: tuple[int, int], rows: int, scale: torch.Tensor) -> torch.Tensor:
    """The scale of each element."""
    height = rows if shape[0] == -1 else shape[0]
    width = WIDTH if shape[1] == -1 else shape[1]
    return scale.double().repeat_interleave(height, 0).repeat_interleave(width, 1)


def largest_of_groups(shape: tuple[int, int], x: torch.Tensor) -> torch.Tensor:
    height = len(x) if shape[0] == -1 else shape[0]
    width = WIDTH if shape[1] == -1 else shape[1]
    columns = [part.abs().amax(1) for part in x.double().split(width, 1)]
    by_row = torch.stack(columns, 1)
    return torch.stack([part.amax(0) for part in by_row.split(height, 0)])


def judge(op: QuantFP8, result: Any, inputs: Inputs, dtype: torch.dtype) -> None:
    x, rows = inputs[0], len(inputs[0])
    quantized, scale = result
    assert quantized.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
    assert quantized.shape == (max(rows, op.num_token_padding or 0), WIDTH)
    assert not quantized[rows:].double().abs().sum()
    if not rows:
        assert scale.numel() == {-1: 1, 1: 0}[op.group_shape.row] * {-1: 1, 1: WIDTH}.get(op.group_shape.col, 3)
        return
    if op.static:
        assert torch.equal(scale.flatten(), inputs[1].flatten())
    else:
        largest = largest_of_groups(op.group_shape, x)
        if len(inputs) > 2:
            largest = largest.clamp(max=inputs[2].item())
        exact = largest / LARGEST
        if op.use_ue8m0:
            assert (scale.log2() == scale.log2().round()).all() and (scale >= exact * (1 - 1e-6)).all()
            exact = 2.0 ** torch.ceil(torch.log2(exact) - 1e-6)
        assert ((scale - exact).abs() <= 1e-6 * exact).all()
    each = spread(op.group_shape, rows, scale.expand(-1, 1) if scale.numel() == 1 else scale)
    wanted = (x.double() / each).clamp(-LARGEST, LARGEST)
    nearest = (wanted.unsqueeze(-1) - GRID).abs().amin(-1)
    error = (quantized[:rows].double() - wanted).abs()
    assert (error <= nearest + 1e-6 * wanted.abs()).all(), f"not the nearest by {(error - nearest).max():.3g}"


def inputs(*scale_shape: int, bound: bool = False) -> Callable[[int, torch.dtype, torch.Generator], Inputs]:
    """x, then a static scale of `scale_shape` (0: one per row), or an upper bound of dynamic ones."""

    def make(rows: int, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        x = normal(rows, WIDTH, dtype=dtype, generator=generator, scale=5.0)
        if bound:
            return x, None, torch.tensor(6.0)
        if not scale_shape:
            return (x,)
        shape = [rows if size == 0 else size for size in scale_shape]
        return x, torch.rand(shape, generator=generator) * 0.03 + 0.005

    return make


def case(given: Any, static: bool, shape: tuple[int, int], **more: Any) -> Case:
    return Case(lambda _: QuantFP8(static, shape, **more), given, lambda *_: None, judge=judge)


QUANT: dict[str, list[Case]] = {
    "quant_fp8": [
        case(inputs(), False, PER_TENSOR),
        case(inputs(), False, PER_TOKEN, num_token_padding=8),
        case(inputs(), False, PER_CHANNEL),
        case(inputs(), False, (1, 16), column_major_scales=True),
        case(inputs(), False, (1, 16), use_ue8m0=True),
        case(inputs(bound=True), False, PER_TOKEN),
        case(inputs(1), True, PER_TENSOR),
        case(inputs(0, 1), True, PER_TOKEN),
        case(inputs(WIDTH), True, PER_CHANNEL),
        case(inputs(0, 3), True, (1, 16)),
    ],
}
