"""Integers, scales and minima -> the blocks of GGUF tensors, exactly: the inverse of `gguf_blocks.py`.

Owns which type holds a weight exactly, and its bytes: Q8_0, Q4_0, Q4_K and MXFP4.
"""

from __future__ import annotations

import torch

from llm.kernels.reference.gguf_blocks import BLOCKS
from llm.quantization.quantizer import IntegerWeight
from llm.quantization.tables import doubled_fp4

_GROUP = 32
_LEVELS = 63


def type_of(weight: IntegerWeight) -> str:
    """The type whose blocks are this weight bit for bit; ValueError with the reason where there is none."""
    columns = weight.q.shape[1]
    if weight.q.is_floating_point():
        raise ValueError("8-bit floats")
    if weight.zero is not None or weight.columns is not None:
        raise ValueError("zero points or an order of its columns")
    if weight.group_size != _GROUP or columns % _GROUP:
        raise ValueError(f"groups of {weight.group_size}")
    if weight.table is not None:
        fraction, exponent = torch.frexp(weight.scale)
        is_power = bool(((fraction == 0.5) & (exponent > -127) & (exponent <= 127)).all())
        if not torch.equal(weight.table, doubled_fp4()) or not is_power:
            raise ValueError("a table of values")
        return "MXFP4"
    if weight.minimum is not None:
        if weight.bits != 4 or columns % BLOCKS["Q4_K"].values:
            raise ValueError(f"minima, in {weight.bits} bits and {columns} columns")
        return "Q4_K"
    if not torch.equal(weight.scale.half().float(), weight.scale):
        raise ValueError("scales that are no float16")
    return "Q4_0" if weight.bits == 4 else "Q8_0"


def pack_blocks(weight: IntegerWeight, kind: str) -> torch.Tensor:
    """uint8 [N, bytes of a row], for `gguf_blocks` to decode to the same; ValueError where Q4_K cannot hold it."""
    pack = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_K": _q4_k, "MXFP4": _mxfp4}[kind]
    return pack(weight).view(len(weight.q), -1)


def _half_bytes(values: torch.Tensor) -> torch.Tensor:
    """float32 [B, n] -> uint8 [B, 2n]."""
    return values.half().contiguous().view(torch.uint8)


def _joined(codes: torch.Tensor) -> torch.Tensor:
    """Codes from 0 to 15 [B, 32] -> uint8 [B, 16]: the first half in the low nibbles."""
    low, high = codes.to(torch.uint8).chunk(2, dim=1)
    return low | high << 4


def _q8_0(weight: IntegerWeight) -> torch.Tensor:
    return torch.cat((_half_bytes(weight.scale.reshape(-1, 1)), weight.q.reshape(-1, _GROUP).view(torch.uint8)), dim=1)


def _q4_0(weight: IntegerWeight) -> torch.Tensor:
    return torch.cat((_half_bytes(weight.scale.reshape(-1, 1)), _joined(weight.q.reshape(-1, _GROUP) + 8)), dim=1)


def _mxfp4(weight: IntegerWeight) -> torch.Tensor:
    """The scale is halved for a doubled table, so the byte counts from one more."""
    exponent = torch.frexp(weight.scale.reshape(-1, 1))[1] + 127
    return torch.cat((exponent.to(torch.uint8), _joined(weight.q.reshape(-1, _GROUP) + 8)), dim=1)


def _q4_k(weight: IntegerWeight) -> torch.Tensor:
    if weight.minimum is None:
        raise ValueError("no minima")
    unit, scales = _factors(weight.scale.reshape(-1, 8))
    base, minima = _factors(weight.minimum.reshape(-1, 8))
    first = scales[:, :4] | scales[:, 4:] >> 4 << 6
    second = minima[:, :4] | minima[:, 4:] >> 4 << 6
    third = scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4
    codes = (weight.q + 8).reshape(-1, 4, 2 * _GROUP).flatten(0, 1)
    return torch.cat((_half_bytes(unit), _half_bytes(base), first, second, third, _joined(codes).view(-1, 128)), dim=1)


def _factors(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [B, 8] as the products of a float16 [B, 1] and levels from 0 to 63, uint8 [B, 8]; ValueError if not.

    A file's own levels may have been others with the same products; the largest level is usually 63.
    """
    largest = values.abs().amax(dim=1, keepdim=True)
    sign = torch.where((values < 0).any(dim=1, keepdim=True), -1.0, 1.0)
    unit, levels = torch.zeros_like(largest), torch.zeros_like(values)
    found = largest[:, 0] == 0
    for top in range(_LEVELS, 0, -1):
        left = (~found).nonzero()[:, 0]
        if not len(left):
            break
        tried = (sign[left] * largest[left] / top).half().float()
        level = torch.where(tried == 0, torch.zeros_like(values[left]), (values[left] / tried).round())
        exact = ((level >= 0) & (level <= _LEVELS) & (level * tried == values[left])).all(dim=1)
        unit[left[exact]], levels[left[exact]] = tried[exact], level[exact]
        found[left[exact]] = True
    if not found.all():
        raise ValueError("scales that are no products of a float16 and 6 bits")
    return unit, levels.to(torch.uint8)
