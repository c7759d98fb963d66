"""Quantizing float weights to floats of 8 and of 4 bits: rounding to nearest, ties to even.

Owns the arithmetic; `quantizer.py` is its twin for integers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from llm.quantization.quantizer import Quantized
from llm.quantization.tables import doubled_fp4, nf4

_LARGEST_FLOAT8 = 448.0
# Of e2m1, by code. Halfway values round to the even code.
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_LARGEST_EXPONENT = 2
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
        largest = _largest(groups)
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
    table = doubled_fp4()
    for part, groups in parts_of(weight, group_size):
        largest = _largest(groups)
        exponent = (torch.frexp(largest)[1] - 1 - _LARGEST_EXPONENT).clamp_(*_EXPONENTS)
        tried = []
        for power in (exponent, exponent + 1):
            half = torch.ldexp(torch.ones(power.shape), power - 1)
            codes = _nearest_fp4(groups / (2 * half))
            tried.append((half, codes, table[codes.long()] * half))
        errors = [(groups - value).square_().sum(-1, keepdim=True) for _, _, value in tried]
        half, codes, value = (
            torch.where(errors[0] <= errors[1], first, second) for first, second in zip(*tried, strict=True)
        )
        q[part], result.scale[part] = (codes - 8).view(-1, columns), half[..., 0]
        square_errors(result, groups, value)
    return result


def quantize_nf4(weight: torch.Tensor, group_size: int) -> Quantized:
    """Codes of NormalFloat4 less 8, the nearest in value; the scale is a group's largest magnitude.

    Raises ValueError: a weight is not finite.
    """
    rows, columns = weight.shape
    result = Quantized(torch.empty(rows, columns, dtype=torch.int8), torch.empty(rows, columns // group_size), 0.0, 0.0)
    table = nf4()
    borders = (table[1:] + table[:-1]) / 2
    for part, groups in parts_of(weight, group_size):
        largest = _largest(groups)
        scale = torch.where(largest == 0, torch.ones_like(largest), largest)
        codes = torch.bucketize(groups / scale, borders)
        result.q[part], result.scale[part] = (codes - 8).to(torch.int8).view(-1, columns), scale[..., 0]
        square_errors(result, groups, table[codes] * scale)
    return result


def parts_of(weight: torch.Tensor, group_size: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """(rows, their values float32 [R, G, group_size]), some rows at a time."""
    step = max(1, _CHUNK_ELEMENTS // max(1, weight.shape[1]))
    for start in range(0, len(weight), step):
        rows = slice(start, start + step)
        yield rows, weight[rows].float().unflatten(1, (-1, group_size))


def _largest(groups: torch.Tensor) -> torch.Tensor:
    largest = groups.abs().amax(dim=-1, keepdim=True)
    if not largest.isfinite().all():
        raise ValueError("holds NaN or infinite values and cannot be quantized")
    return largest


def _nearest_fp4(values: torch.Tensor) -> torch.Tensor:
    """The code of the nearest value, int8; beyond 6 it is that of 6."""
    halfway = (_FP4[1:] + _FP4[:-1]) / 2
    halfway[1::2] = torch.nextafter(halfway[1::2], torch.zeros(()))  # from the odd code on, a tie goes up
    codes = torch.bucketize(values.abs().contiguous(), halfway).to(torch.int8)
    return codes + 8 * (values < 0).to(torch.int8)


def square_errors(result: Quantized, groups: torch.Tensor, value: torch.Tensor) -> None:
    """Add a part's sums of squares to those of the whole weight."""
    result.signal += float(groups.square().sum())
    result.noise += float((groups - value).square().sum())
