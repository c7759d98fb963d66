"""Weights in panels of 16 rows, as the kernels read them: packing once, and back, bit for bit.

Same names and signatures as in `kernels/reference`, the library first. kernels/README.md draws the panels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llm.kernels.cpu.library import Library
from llm.kernels.cpu.signatures import KERNELS
from llm.kernels.reference.quantized import PackedWeight

LANES = 16
# torch dtype -> its number in gemm_float.cpp
FLOAT_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# torch dtype -> how many k of a row lie side by side in its panels, when not one
_DEPTHS = {torch.bfloat16: 2}
# Sums of k products of two int8 stay within int32.
MAX_INTEGER_K = 1 << 17
# Bytes of the pages that large weights lie in where the system has them: fewer addresses to translate.
_LARGE_PAGE = 2 << 20

_PACK_FLOAT = KERNELS["llm_pack_float"]
_UNPACK_FLOAT = KERNELS["llm_unpack_float"]
_PACK_INT8 = KERNELS["llm_pack_int8"]
_PACK_INT4 = KERNELS["llm_pack_int4"]
_UNPACK_INT4 = KERNELS["llm_unpack_int4"]
_UNPACK_INT8 = KERNELS["llm_unpack_int8"]


@dataclass(frozen=True)
class PanelWeight(PackedWeight):
    """`PackedWeight` in panels.

    Attributes:
        library: whose kernels read it.
        sums: int32, sum_k of each row; for int8 only.
    """

    library: Library
    sums: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.sums is None else self.sums.nbytes)

    def rows(self, start: int, end: int) -> torch.Tensor:
        start, end, _ = slice(start, end).indices(self.n)
        shape = (max(0, end - start), self.k)
        threads = torch.get_num_threads()
        if self.kind == "float":
            out = torch.empty(shape, dtype=self.data.dtype)
            kind, data = FLOAT_KINDS[self.data.dtype], self.data.data_ptr()
            self.library.call(_UNPACK_FLOAT, kind, data, out.data_ptr(), start, start + shape[0], self.k, threads)
            return out
        out = torch.empty(shape, dtype=torch.int8)
        unpack, data = _UNPACK_INT8 if self.kind == "int8" else _UNPACK_INT4, self.data.data_ptr()
        self.library.call(unpack, data, out.data_ptr(), start, start + shape[0], self.k, threads)
        return out


def pack_float(lib: Library, weight: torch.Tensor, reuse: bool = False) -> PanelWeight:
    """float32 or float16 [N, K] -> panels [N / 16][K][16] in its type; bfloat16 -> [N / 16][K / 2][16][2].

    `reuse`: the weight's memory may be overwritten; it is then the packed weight's, when N is a multiple of 16 (and K
    even, of bfloat16).
    """
    if weight.dtype not in FLOAT_KINDS or weight.dim() != 2:
        raise ValueError(f"a weight is float32, bfloat16 or float16 [N, K], got {weight.dtype} {list(weight.shape)}")
    n, k = weight.shape
    weight = weight.contiguous()
    size = _padded(n) * _padded(k, _DEPTHS.get(weight.dtype, 1))
    data = weight.view(-1) if reuse and weight.numel() == size else _allocate(lib, size, weight.dtype)
    kind, threads = FLOAT_KINDS[weight.dtype], torch.get_num_threads()
    lib.call(_PACK_FLOAT, kind, weight.data_ptr(), data.data_ptr(), n, k, threads)
    _move_to_large_pages(lib, data)
    return PanelWeight(data, n, k, "float", lib)


def pack_int8(lib: Library, weight: torch.Tensor) -> PanelWeight:
    """int8 [N, K] -> panels [N / 16][K / 4][16][4]."""
    n, k = _check_integers(weight)
    data = _allocate(lib, _padded(n) * _padded(k, 4), torch.int8)
    sums = torch.empty(_padded(n), dtype=torch.int32)
    weight = weight.contiguous()
    lib.call(_PACK_INT8, weight.data_ptr(), data.data_ptr(), sums.data_ptr(), n, k, torch.get_num_threads())
    _move_to_large_pages(lib, data)
    return PanelWeight(data, n, k, "int8", lib, sums)


def pack_int4(lib: Library, weight: torch.Tensor) -> PanelWeight:
    """int8 [N, K] with values in [-8, 7] -> panels [N / 16][K / 8][16][4] of two values in a byte."""
    n, k = _check_integers(weight)
    if weight.numel() and (weight.min() < -8 or weight.max() > 7):
        raise ValueError(f"int4 values lie in [-8, 7], got [{int(weight.min())}, {int(weight.max())}]")
    data = _allocate(lib, _padded(n) * _padded(k, 8) // 2, torch.uint8)
    weight = weight.contiguous()
    lib.call(_PACK_INT4, weight.data_ptr(), data.data_ptr(), n, k, torch.get_num_threads())
    _move_to_large_pages(lib, data)
    return PanelWeight(data, n, k, "int4", lib)


def _allocate(lib: Library, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory for panels, from the start of a large page on where there is enough of it, so that few are left out."""
    data = torch.empty(size, dtype=dtype)
    if data.nbytes >= _LARGE_PAGE:
        room = torch.empty(data.nbytes + _LARGE_PAGE, dtype=torch.uint8)
        start = -room.data_ptr() % _LARGE_PAGE
        data = room[start : start + data.nbytes].view(dtype)
        lib.ask_large_pages(data.data_ptr(), data.nbytes)
    return data


def _move_to_large_pages(lib: Library, data: torch.Tensor) -> None:
    """What `_allocate` asked for comes too late where the memory was used before, in small pages."""
    if data.nbytes >= _LARGE_PAGE:
        lib.ask_large_pages(data.data_ptr(), data.nbytes, written=True)


def _check_integers(weight: torch.Tensor) -> tuple[int, int]:
    if weight.dim() != 2 or weight.dtype != torch.int8:
        raise ValueError(f"a weight is torch.int8 [N, K], got {weight.dtype} {list(weight.shape)}")
    if weight.shape[1] > MAX_INTEGER_K:
        raise ValueError(f"K is {weight.shape[1]}; beyond {MAX_INTEGER_K} a sum of products can leave int32")
    return weight.shape[0], weight.shape[1]


def _padded(count: int, multiple: int = LANES) -> int:
    return -(-count // multiple) * multiple
