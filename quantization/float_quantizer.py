"""Quantizing float weights to floats of 8 and of 4 bits: rounding to nearest, ties to even.

Owns the arithmetic; `quantizer.py` is its twin for integers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from llm.quantization.quantizer import Quantized
from llm.quantization.tables import nf4

_LARGEST_FLOAT8 = 448.0
_LARGEST_FP4 = 6.0
_LARGEST_EXPONENT = 2
# Of a float32's bits.
_SIGN_BIT, _EXPONENT_BITS, _EXPONENT_STEP, _ONE = -(1 << 31), 0xFF << 23, 1 << 23, 127 << 23
# So that half of a scale is still a byte of MXFP4, and above it nothing is infinite.
_EXPONENTS = (-126, 100)
# A weight is quantized this many elements at a time.
_CHUNK_ELEMENTS = 1 << 18


def quantize_float8(weight: torch.Tensor, group_size: int) -> Quantized:
    """float8_e4m3fn, one scale per row and group of columns: the largest value is 448 times the scale.

    Raises ValueError: a weight is not finite.
    """
    rows, columns = weight.shape
    q = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    result = Quantized(q, torch.empty(rows, columns // group_size), 0.0, 0.0)
    for part, groups in parts_of(weight, group_size):
        largest = largest_of(groups)
        scale = torch.where(largest == 0, torch.ones_like(largest), largest / _LARGEST_FLOAT8)
        found = (groups / scale).clamp_(-_LARGEST_FLOAT8, _LARGEST_FLOAT8).to(q.dtype)
        q[part], result.scale[part] = found.view(-1, columns), scale[..., 0]
        square_errors(result, groups, found.float() * scale)
    return result


def quantize_mxfp4(weight: torch.Tensor, group_size: int) -> Quantized:
    """Codes of e2m1 less 8, one power of two per row and group of columns.

    Of the two powers that the largest value lies between, the one with the smaller squared error: the smaller one clips
    values beyond 6 times it. `scale` is half of it, for `doubled_fp4`. Raises ValueError: a weight is not finite.
    """
    rows, columns = weight.shape
    q = torch.empty(rows, columns, dtype=torch.int8)
    result = Quantized(q, torch.empty(rows, columns // group_size), 0.0, 0.0)
    for part, groups in parts_of(weight, group_size):
        largest = largest_of(groups)
        exponent = (torch.frexp(largest)[1] - 1 - _LARGEST_EXPONENT).clamp_(*_EXPONENTS)
        scales = [torch.ldexp(torch.ones(exponent.shape), power) for power in (exponent, exponent + 1)]
        tried = [_nearest_fp4(groups / scale) for scale in scales]
        errors = [
            torch.addcmul(groups, value, scale, value=-1).square_().sum(-1, keepdim=True)
            for value, scale in zip(tried, scales, strict=True)
        ]
        first = errors[0] <= errors[1]
        scale, value = (torch.where(first, pair[0], pair[1]) for pair in (scales, tried))
        q[part], result.scale[part] = (_codes_of_fp4(value) - 8).view(-1, columns), 0.5 * scale[..., 0]
        square_errors(result, groups, value * scale)
    return result


def quantize_nf4(weight: torch.Tensor, group_size: int) -> Quantized:
    """Codes of NormalFloat4 less 8, the nearest in value; the scale is a group's largest magnitude.

    Raises ValueError: a weight is not finite.
    """
    rows, columns = weight.shape
    result = Quantized(torch.empty(rows, columns, dtype=torch.int8), torch.empty(rows, columns // group_size), 0.0, 0.0)
    table = nf4()
    borders = ((table[1:] + table[:-1]) / 2).tolist()
    for part, groups in parts_of(weight, group_size):
        largest = largest_of(groups)
        scale = torch.where(largest == 0, torch.ones_like(largest), largest)
        x = groups / scale
        codes = torch.zeros(x.shape, dtype=torch.int8)
        for border in borders:  # comparisons of a part in the L2 cache are faster than `torch.bucketize`
            codes += (x > border).view(torch.int8)
        result.q[part], result.scale[part] = (codes - 8).view(-1, columns), scale[..., 0]
        square_errors(result, groups, table[codes.int()] * scale)
    return result


def parts_of(weight: torch.Tensor, group_size: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """(rows, their values float32 [R, G, group_size]), some rows at a time."""
    step = max(1, _CHUNK_ELEMENTS // max(1, weight.shape[1]))
    for start in range(0, len(weight), step):
        rows = slice(start, start + step)
        yield rows, weight[rows].float().unflatten(1, (-1, group_size))


def largest_of(groups: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each group, [..., 1]. Raises ValueError: a value is not finite."""
    largest = groups.abs().amax(dim=-1, keepdim=True)
    if not largest.isfinite().all():
        raise ValueError("holds NaN or infinite values and cannot be quantized")
    return largest


def _nearest_fp4(x: torch.Tensor) -> torch.Tensor:
    """The nearest value of e2m1; halfway the one with the even code; beyond 6 it is 6."""
    x = x.clamp(-_LARGEST_FP4, _LARGEST_FP4).add_(0.0)  # -0 + 0 is 0
    # Neighbours below 2 differ by a half, above it by half of the power of two below them.
    power = (x.view(torch.int32) & _EXPONENT_BITS).clamp_(min=_ONE)
    step = power.sub_(_EXPONENT_STEP).view(torch.float32)
    return (x / step).round_().mul_(step)


def _codes_of_fp4(values: torch.Tensor) -> torch.Tensor:
    """The codes of values of e2m1, int8; that of -0 is 8."""
    bits = values.view(torch.int32)
    # From 1 on a code is the exponent and the first bit of the mantissa; below it there are 0 and a half.
    codes = ((bits & ~_SIGN_BIT) >> 22) - ((_ONE >> 22) - 2)
    codes = torch.where(codes < 2, (values.abs() * 2).to(torch.int32), codes)
    return (codes + 8 * (bits < 0)).to(torch.int8)


def square_errors(result: Quantized, groups: torch.Tensor, value: torch.Tensor) -> None:
    """Add a part's sums of squares to those of the whole weight."""
    result.signal += float(groups.square().sum())
    result.noise += float((groups - value).square().sum())
