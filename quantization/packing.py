"""How checkpoints pack small integers, bit for bit, and the values that codes of 4 bits stand for.

These are the byte layouts of files; the layout of weights in memory is the kernels' (`pack` of a backend).
"""

from __future__ import annotations

import torch

from llm.kernels.reference.quantize_weight import NF4


def pack_to_int32(values: torch.Tensor, bits: int, dim: int = 1) -> torch.Tensor:
    """compressed-tensors' pack-quantized format: a dense little-endian stream of `bits`-bit numbers in 32-bit words.

    Each value is stored plus 2**(bits - 1). Weights are packed along K (dim 1), zero points along N (dim 0).

    Shapes: int8 [R, C] -> int32 [R, ceil(C * bits / 32)], or [ceil(R * bits / 32), C] for dim 0.
    """
    if dim == 0:
        return pack_to_int32(values.t(), bits).t().contiguous()
    rows, columns = values.shape
    words = -(-columns * bits // 32)
    unsigned = (values.to(torch.int32) + (1 << (bits - 1))).to(torch.uint8)
    stream = torch.zeros(rows, words * 32, dtype=torch.uint8)
    stream[:, : columns * bits] = (unsigned[:, :, None] >> torch.arange(bits, dtype=torch.uint8) & 1).flatten(1)
    shifts = torch.arange(8, dtype=torch.uint8)
    as_bytes = (stream.view(rows, words * 4, 8) << shifts).sum(dim=2, dtype=torch.uint8)
    return as_bytes.view(torch.int32)


def unpack_from_int32(words: torch.Tensor, bits: int, shape: tuple[int, int], dim: int = 1) -> torch.Tensor:
    """The inverse of `pack_to_int32`: int8 of `shape`."""
    if dim == 0:
        return unpack_from_int32(words.t(), bits, (shape[1], shape[0])).t().contiguous()
    rows, columns = shape
    as_bytes = words.contiguous().view(torch.uint8)
    if 8 % bits == 0:  # whole values in every byte
        places = torch.arange(0, 8, bits, dtype=torch.uint8)
        values = ((as_bytes[:, :, None] >> places) & ((1 << bits) - 1)).flatten(1)[:, :columns]
    else:
        stream = (as_bytes[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)[:, : columns * bits]
        places = torch.arange(bits, dtype=torch.uint8)
        values = (stream.view(rows, columns, bits) << places).sum(dim=2, dtype=torch.uint8)
    return (values.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)


# AWQ's `gemm` layout: the eight columns of a word, from its lowest nibble on.
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def unpack_awq(words: torch.Tensor) -> torch.Tensor:
    """int32 [R, C / 8] of unsigned nibbles in AWQ's order -> int8 [R, C], each less 8."""
    values = unpack_from_int32(words, 4, (words.shape[0], words.shape[1] * 8))
    return values.unflatten(1, (-1, 8))[:, :, list(map(_AWQ_COLUMNS.index, range(8)))].flatten(1)


def packed_words(count: int, bits: int) -> int:
    """Number of 32-bit words that hold `count` numbers."""
    return -(-count * bits // 32)


def pack_fp4(codes: torch.Tensor) -> torch.Tensor:
    """4-bit floats: codes [N, K], 0 to 15, K even -> uint8 [N, K / 2], the even column's in the low nibble."""
    codes = codes.to(torch.uint8)
    return codes[:, 0::2] | codes[:, 1::2] << 4


def unpack_fp4(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_fp4`: uint8."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)


def pack_row_pairs(values: torch.Tensor) -> torch.Tensor:
    """ModelSlim's int4, version 1.0.0: byte [j, k] has row 2j in its low nibble and row 2j + 1 in its high nibble.

    Shapes: int8 [N, K] in [-8, 7], N even -> int8 [N / 2, K].
    """
    return (values[0::2] & 15) | (values[1::2] << 4)


def unpack_row_pairs(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_row_pairs`: int8 [N / 2, K] -> int8 [N, K]."""
    return torch.stack(((packed << 4) >> 4, packed >> 4), dim=1).flatten(0, 1)


def pack_column_pairs(values: torch.Tensor) -> torch.Tensor:
    """ModelSlim's W4A16 with one scale per row: byte [n, j] has column 2j in its low nibble, 2j + 1 in its high one.

    Shapes: int8 [N, K] in [-8, 7], K even -> int8 [N, K / 2].
    """
    return (values[:, 0::2] & 15) | (values[:, 1::2] << 4)


def unpack_column_pairs(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_column_pairs`: int8 [N, K / 2] -> int8 [N, K]."""
    return torch.stack(((packed << 4) >> 4, packed >> 4), dim=2).flatten(1)


def unpack_deq_scale(stored: torch.Tensor) -> torch.Tensor:
    """float32 from either form of ModelSlim's deq_scale: float32, or (float16 models) int64 whose low 32 bits are those
    of a float32."""
    return stored.to(torch.int32).view(torch.float32) if stored.dtype == torch.int64 else stored.float()


# e2m1: a sign, then 0, 0.5, 1, 1.5, 2, 3, 4 or 6.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def nf4() -> torch.Tensor:
    """The value of each code, in ascending order."""
    return torch.tensor(NF4)


def doubled_fp4() -> torch.Tensor:
    """Twice the value of each code, by the code; -0 is 0."""
    return torch.tensor([2 * value for value in _FP4] + [0.0 - 2 * value for value in _FP4])
