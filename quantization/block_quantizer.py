"""Quantizing float weights to the blocks of GGUF: Q8_0 and Q4_0 as ggml rounds them, Q4_K by a search.

Owns the arithmetic; `quantizer.py` and `float_quantizer.py` are its twins, `storage/gguf_pack.py` has the bytes. Scales
are what a block can store: float16, or in Q4_K the product of a float16 and an integer from 0 to 63.
"""

from __future__ import annotations

import torch

from llm.quantization.float_quantizer import largest_of, parts_of, square_errors
from llm.quantization.quantizer import Quantized

GROUP = 32
# Columns of a block of Q4_K: 8 groups, whose scales and minima share a float16 each.
SUPER_BLOCK = 256
_MOST_CODE = 15
_MOST_LEVEL = 63
# What the largest code stands for, tried for each group: a little less than the range clips, a little more shifts.
_RANGES = tuple(_MOST_CODE + 0.1 * step for step in range(-10, 11, 2))
# So that scales and minima are within float16's range.
_LARGEST = 65504.0 * _MOST_LEVEL
_NEAR = tuple((first, second) for first in (0, -1, 1) for second in (0, -1, 1))
_BEYOND = "holds values beyond the range of the blocks' float16 scales"


def quantize_q8_0(weight: torch.Tensor) -> Quantized:
    """Rounds to nearest, halves away from zero. Raises ValueError: a weight is not finite, or too large."""
    result = _empty(weight)
    for rows, groups in parts_of(weight, GROUP):
        scale = largest_of(groups) / 127
        x = groups * _inverse(scale)
        # As ggml-quants.c and `gguf` round: the magnitude's floor, plus one where twice the rest reaches one.
        magnitude = x.abs()
        floor = magnitude.floor()
        codes = torch.copysign(floor + ((magnitude - floor) * 2).floor(), x)
        _put(result, rows, groups, codes, scale)
    return result


def quantize_q4_0(weight: torch.Tensor) -> Quantized:
    """The value of the largest magnitude becomes -8. Raises ValueError: a weight is not finite, or too large."""
    result = _empty(weight)
    for rows, groups in parts_of(weight, GROUP):
        scale = _signed_largest(groups) / -8
        codes = torch.trunc(groups * _inverse(scale) + 8.5).clamp_(0, _MOST_CODE) - 8
        _put(result, rows, groups, codes, scale)
    return result


def quantize_q4_k(weight: torch.Tensor) -> Quantized:
    """Codes from 0 to 15 less 8, and a minimum for each group: W = code * scale - minimum.

    For each group several ranges are tried, and refitted by least squares to the codes that they give. Rounded to
    levels of the block's two float16, the neighbouring levels are tried too; the least squared error wins.

    Raises ValueError: a weight is not finite, or too large.
    """
    result = _empty(weight)
    result.minimum = torch.empty_like(result.scale)
    for rows, groups in parts_of(weight, GROUP):
        if (largest_of(groups) > _LARGEST).any():
            raise ValueError(_BEYOND)
        x = groups.reshape(-1, SUPER_BLOCK // GROUP, GROUP)
        step, least = _best_lines(x)
        codes, scale, minimum = _on_levels(x, step, least)
        result.q[rows] = (codes - 8).to(torch.int8).view(len(groups), -1)
        result.scale[rows] = scale.view(len(groups), -1)
        result.minimum[rows] = minimum.view(len(groups), -1)
        square_errors(result, x, codes * scale - minimum)
    return result


def _empty(weight: torch.Tensor) -> Quantized:
    rows, columns = weight.shape
    q = torch.empty(rows, columns, dtype=torch.int8)
    return Quantized(q, torch.empty(rows, columns // GROUP), 0.0, 0.0)


def _signed_largest(groups: torch.Tensor) -> torch.Tensor:
    """The value of the largest magnitude, with its sign; the first of several. Raises ValueError: one is not finite."""
    largest_of(groups)
    return groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True))


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, torch.zeros_like(scale), 1 / scale)


def _half(values: torch.Tensor) -> torch.Tensor:
    """Rounded to float16."""
    rounded = values.half()
    if not rounded.isfinite().all():
        raise ValueError(_BEYOND)
    return rounded.float()


def _put(result: Quantized, rows: slice, groups: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> None:
    stored = _half(scale)
    result.q[rows] = codes.to(torch.int8).view(len(groups), -1)
    result.scale[rows] = stored[..., 0]
    square_errors(result, groups, codes * stored)


def _best_lines(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, minimum) [B, 8, 1] of each group, real numbers: x ~ code * scale - minimum, both at least 0."""
    low = x.amin(dim=-1, keepdim=True).clamp_(max=0.0)
    span = x.amax(dim=-1, keepdim=True).clamp_(min=0.0) - low
    total = x.sum(dim=-1, keepdim=True)
    best = torch.full_like(low, torch.inf)
    scale, minimum = torch.zeros_like(low), -low
    for most in _RANGES:
        codes = ((x - low) * (most * _inverse(span))).round_().clamp_(0, _MOST_CODE)
        fit_scale, fit_minimum = _fitted(codes, x, total)
        error = torch.addcmul(x + fit_minimum, codes, fit_scale, value=-1).square_().sum(dim=-1, keepdim=True)
        better = error < best
        best = torch.where(better, error, best)
        scale, minimum = torch.where(better, fit_scale, scale), torch.where(better, fit_minimum, minimum)
    return scale, minimum


def _fitted(codes: torch.Tensor, x: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Least squares of x ~ code * scale - minimum; a negative minimum is 0."""
    count = x.shape[-1]
    ones = codes.sum(dim=-1, keepdim=True)
    squares, products = codes.square().sum(dim=-1, keepdim=True), (codes * x).sum(dim=-1, keepdim=True)
    determinant = count * squares - ones.square()
    scale = (count * products - ones * total) * _inverse(determinant)
    minimum = (ones * products - squares * total) * _inverse(determinant)
    through_zero = (minimum < 0) | (determinant <= 0)
    scale = torch.where(through_zero, products * _inverse(squares), scale).clamp_(min=0.0)
    return scale, torch.where(through_zero, torch.zeros_like(minimum), minimum)


def _on_levels(
    x: torch.Tensor, step: torch.Tensor, least: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes [B, 8, 32], scale and minimum [B, 8, 1]) where both are a level from 0 to 63 of the block's float16."""
    unit, base = (_half(part.amax(dim=1, keepdim=True) / _MOST_LEVEL) for part in (step, least))
    level, floor = ((part * _inverse(whole)).round_() for part, whole in ((step, unit), (least, base)))
    best = torch.full_like(step, torch.inf)
    codes, scale, minimum = torch.zeros_like(x), torch.zeros_like(step), torch.zeros_like(least)
    for up, down in _NEAR:
        tried_scale = (level + up).clamp(0, _MOST_LEVEL) * unit
        tried_minimum = (floor + down).clamp(0, _MOST_LEVEL) * base
        tried = ((x + tried_minimum) * _inverse(tried_scale)).round_().clamp_(0, _MOST_CODE)
        error = torch.addcmul(x + tried_minimum, tried, tried_scale, value=-1).square_().sum(dim=-1, keepdim=True)
        better = error < best
        best = torch.where(better, error, best)
        codes, scale = torch.where(better, tried, codes), torch.where(better, tried_scale, scale)
        minimum = torch.where(better, tried_minimum, minimum)
    return codes, scale, minimum
