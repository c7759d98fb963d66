"""The blocks of GGUF tensors: bytes of a file -> integers, scales and minima, exactly.

Layouts are those of https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h. A block holds the values
of 32 or 256 columns of a row; within it groups of 16 or 32 columns share a scale. What ggml computes of a block,
value * scale or code * scale - minimum, is what `Weight` stands for, with the same rounding: products of the file's
short scales with its integers are exact in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

_TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
# The values that the 16 codes of IQ4_NL and IQ4_XS stand for, and twice those of MXFP4.
_NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
NOT_FINITE = "has a scale that is not finite"
# Blocks are decoded so many values at a time: temporary memory stays small.
_VALUES_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Decoded:
    """The values of some blocks.

    Attributes:
        q: int8 [B, values]; with a minimum, codes from 0 on; with a table, codes less 8.
        scale, minimum: float32 [B, groups]; W = q * scale - minimum. None: no minimum.
    """

    q: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor | None = None


@dataclass(frozen=True)
class Block:
    """A type.

    Attributes:
        values, bytes: of one block.
        dtype: of floats; else None.
        kind: of the weight that holds its integers, "int8" or "int4".
        group: columns that share a scale.
        has_minimum: codes are unsigned, and a minimum is subtracted.
        decode: uint8 [B, bytes] -> the block's values.
        table: the 16 whole numbers that codes stand for; (): they are numbers themselves.
    """

    values: int
    bytes: int
    dtype: torch.dtype | None = None
    kind: str = ""
    group: int = 0
    has_minimum: bool = False
    decode: Callable[[torch.Tensor], Decoded] | None = None
    table: tuple[int, ...] = ()


def type_name(number: int) -> str:
    """Of a type as files number it."""
    return _TYPE_NAMES.get(number, f"type {number}")


def type_number(name: str) -> int:
    """The inverse of `type_name`."""
    return next(number for number, known in _TYPE_NAMES.items() if known == name)


def _half(raw: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte `start` of each block, float32 [B, 1]."""
    return raw[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(raw: torch.Tensor) -> torch.Tensor:
    """uint8 [..., B] -> [..., 2B]: all low nibbles, then all high ones."""
    return torch.cat((raw & 15, raw >> 4), dim=-1)


def _bits(raw: torch.Tensor, width: int, count: int) -> torch.Tensor:
    """uint8 [B, n, m] -> [B, n, count, m]: the lowest `width` bits, the next, ..."""
    shifts = torch.arange(0, width * count, width, dtype=torch.uint8, device=raw.device)[:, None]
    return (raw[:, :, None] >> shifts) & ((1 << width) - 1)


def _fifth_bits(raw: torch.Tensor) -> torch.Tensor:
    """uint8 [B, 4] -> [B, 32] of 0 or 16: bit j belongs to value j."""
    return ((raw[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=raw.device)) & 1).flatten(1) << 4


def _signed(codes: torch.Tensor, zero: int) -> torch.Tensor:
    return (codes.to(torch.int16) - zero).to(torch.int8)


def _q8_0(raw: torch.Tensor) -> Decoded:
    return Decoded(raw[:, 2:].contiguous().view(torch.int8), _half(raw, 0))


def _q4_0(raw: torch.Tensor) -> Decoded:
    return Decoded(_signed(_nibbles(raw[:, 2:]), 8), _half(raw, 0))


def _q4_1(raw: torch.Tensor) -> Decoded:
    return Decoded(_signed(_nibbles(raw[:, 4:]), 0), _half(raw, 0), -_half(raw, 2))


def _q5_0(raw: torch.Tensor) -> Decoded:
    return Decoded(_signed(_nibbles(raw[:, 6:]) | _fifth_bits(raw[:, 2:6]), 16), _half(raw, 0))


def _q5_1(raw: torch.Tensor) -> Decoded:
    return Decoded(_signed(_nibbles(raw[:, 8:]) | _fifth_bits(raw[:, 4:8]), 0), _half(raw, 0), -_half(raw, 2))


def _q2_k(raw: torch.Tensor) -> Decoded:
    scales, d, least = raw[:, :16], _half(raw, 80), _half(raw, 82)
    q = _bits(raw[:, 16:80].reshape(-1, 2, 32), 2, 4).flatten(1)
    return Decoded(_signed(q, 0), d * (scales & 15).float(), least * (scales >> 4).float())


def _q3_k(raw: torch.Tensor) -> Decoded:
    low = _bits(raw[:, 32:96].reshape(-1, 2, 32), 2, 4).flatten(1)
    high = _bits(raw[:, None, :32], 1, 8).flatten(1)
    packed = raw[:, 96:108]
    scales = _nibbles(packed[:, :8]) | (_bits(packed[:, None, 8:], 2, 4).flatten(1) << 4)
    return Decoded(_signed(low | high << 2, 4), _half(raw, 108) * (scales.float() - 32))


def _six_bit_pairs(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The 8 scales and the 8 minima in the 12 bytes of Q4_K and Q5_K: uint8 [B, 12] -> float32 [B, 8] twice."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=1)
    minima = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=1)
    return scales.float(), minima.float()


def _q4_k(raw: torch.Tensor) -> Decoded:
    scales, minima = _six_bit_pairs(raw[:, 4:16])
    q = _nibbles(raw[:, 16:].reshape(-1, 4, 32)).flatten(1)
    return Decoded(_signed(q, 0), _half(raw, 0) * scales, _half(raw, 2) * minima)


def _q5_k(raw: torch.Tensor) -> Decoded:
    scales, minima = _six_bit_pairs(raw[:, 4:16])
    low = _nibbles(raw[:, 48:].reshape(-1, 4, 32)).flatten(1)
    high = _bits(raw[:, None, 16:48], 1, 8).flatten(1)
    return Decoded(_signed(low | high << 4, 0), _half(raw, 0) * scales, _half(raw, 2) * minima)


def _q6_k(raw: torch.Tensor) -> Decoded:
    low = _nibbles(raw[:, :128].reshape(-1, 2, 64)).flatten(1)
    high = _bits(raw[:, 128:192].reshape(-1, 2, 32), 2, 4).flatten(1)
    scales = raw[:, 192:208].contiguous().view(torch.int8)
    return Decoded(_signed(low | high << 4, 32), _half(raw, 208) * scales.float())


def _iq4_nl(raw: torch.Tensor) -> Decoded:
    return Decoded(_signed(_nibbles(raw[:, 2:]), 8), _half(raw, 0))


def _iq4_xs(raw: torch.Tensor) -> Decoded:
    low = torch.stack((raw[:, 4:8] & 15, raw[:, 4:8] >> 4), dim=2).flatten(1)
    high = _bits(raw[:, 2:4, None], 2, 4).flatten(1)
    q = _nibbles(raw[:, 8:].reshape(-1, 8, 16)).flatten(1)
    return Decoded(_signed(q, 8), _half(raw, 0) * ((low | high << 4).float() - 32))


def _mxfp4(raw: torch.Tensor) -> Decoded:
    """Scales are powers of two, 2 ** (byte - 127); half of it, as the table holds twice the values."""
    exponent = raw[:, :1].float() - 128
    return Decoded(_signed(_nibbles(raw[:, 1:]), 8), torch.ldexp(torch.ones_like(exponent), exponent))


BLOCKS: dict[str, Block] = {
    "F32": Block(1, 4, torch.float32),
    "F16": Block(1, 2, torch.float16),
    "BF16": Block(1, 2, torch.bfloat16),
    "Q8_0": Block(32, 34, None, "int8", 32, False, _q8_0),
    "Q4_0": Block(32, 18, None, "int4", 32, False, _q4_0),
    "Q4_1": Block(32, 20, None, "int4", 32, True, _q4_1),
    "Q5_0": Block(32, 22, None, "int8", 32, False, _q5_0),
    "Q5_1": Block(32, 24, None, "int8", 32, True, _q5_1),
    "Q2_K": Block(256, 84, None, "int4", 16, True, _q2_k),
    "Q3_K": Block(256, 110, None, "int4", 16, False, _q3_k),
    "Q4_K": Block(256, 144, None, "int4", 32, True, _q4_k),
    "Q5_K": Block(256, 176, None, "int8", 32, True, _q5_k),
    "Q6_K": Block(256, 210, None, "int8", 16, False, _q6_k),
    "IQ4_NL": Block(32, 18, None, "int4", 32, False, _iq4_nl, _NONLINEAR),
    "IQ4_XS": Block(256, 136, None, "int4", 32, False, _iq4_xs, _NONLINEAR),
    "MXFP4": Block(32, 17, None, "int4", 32, False, _mxfp4, _FP4),
}

# The types of integers, in the order of BlockType (kernels/cpu/gguf_blocks.cpp).
TYPES = tuple(name for name, block in BLOCKS.items() if block.dtype is None)


def decode_blocks(
    raw: torch.Tensor,
    kind: str,
    q: torch.Tensor,
    scale: torch.Tensor,
    minimum: torch.Tensor | None,
    least: int,
    looks_up: bool = False,
) -> None:
    """Rows of a tensor, uint8 [N, bytes of a row] -> q int8 [N, K], scale and minimum float32 [N, G], written to.

    The form may be a wider one than the type's own, of the same values: smaller groups, a minimum, numbers for codes.

    Args:
        kind: the type, one of `TYPES`.
        minimum: None: the type has none.
        least: what codes of a weight with minima are counted from, below 0; see `Weight`.
        looks_up: the numbers that codes stand for are written in their place.

    Raises:
        ValueError: a scale or a minimum is not finite.
    """
    block = BLOCKS[kind]
    step = max(1, _VALUES_AT_ONCE // q.shape[1])
    for start in range(0, len(raw), step):
        rows = slice(start, start + step)
        _place(
            decode(raw[rows], block),
            block,
            q[rows],
            scale[rows],
            None if minimum is None else minimum[rows],
            least,
            looks_up,
        )


def _place(
    decoded: Decoded,
    block: Block,
    q: torch.Tensor,
    scale: torch.Tensor,
    minimum: torch.Tensor | None,
    least: int,
    looks_up: bool,
) -> None:
    codes, minima = decoded.q, decoded.minimum
    for values in (decoded.scale, minima):
        if values is not None and not values.isfinite().all():
            raise ValueError(NOT_FINITE)
    if block.table and looks_up:
        codes = torch.tensor(block.table, dtype=torch.int8, device=codes.device)[codes.long() + 8]
    if minima is not None:
        codes = (codes.to(torch.int16) - least).to(torch.int8)
    elif minimum is not None:
        minima = decoded.scale * least  # exact: a power of two
    repeats = scale.shape[1] // decoded.scale.shape[1]
    q.copy_(codes)
    scale.copy_(decoded.scale.repeat_interleave(repeats, dim=1))
    if minimum is not None and minima is not None:
        minimum.copy_(minima.repeat_interleave(repeats, dim=1))


def decode(raw: torch.Tensor, block: Block) -> Decoded:
    """Rows of a tensor: uint8 [R, bytes] -> values [R, K], scales and minima [R, groups]."""
    if block.decode is None:
        raise ValueError("floats are read as they are")
    decoded = block.decode(raw.reshape(-1, block.bytes))
    rows = len(raw)
    minimum = None if decoded.minimum is None else decoded.minimum.reshape(rows, -1)
    return Decoded(decoded.q.view(rows, -1), decoded.scale.reshape(rows, -1), minimum)
