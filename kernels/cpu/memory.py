"""A memory pool for the results of kernels: a block is reused once the last tensor on it is gone.

Allocating megabytes for every layer costs more than computing their contents: each page faults, is zeroed
by the system, and is unmapped again when the tensor is freed.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable

import numpy as np
import torch

from llm.base.locks import renewed_in_children

# Blocks are aligned to cache lines, those of 2 MiB and more to huge pages.
_LINE = 64
_LARGE_PAGE = 1 << 21


class _Loan(weakref.ref):
    """A weak reference to the array that a tensor's storage keeps alive, and the array's block."""

    __slots__ = ("block",)
    block: np.ndarray


class Pool:
    """Memory blocks for tensors; a block becomes free when the last tensor on it is gone.

    Args:
        most_free: free bytes to keep, or twice the largest block if that is more; the oldest free block goes first.
        sizes: rounds a number of bytes up to a block size. With coarser sizes a free block fits more often.
        prepare: called with the address and size of each new block of at least one huge page.

    Attributes:
        made: how many blocks it has allocated.
    """

    def __init__(
        self,
        most_free: int,
        sizes: Callable[[int], int] = lambda nbytes: nbytes,
        prepare: Callable[[int, int], object] = lambda address, nbytes: None,
    ) -> None:
        self._most_free = most_free
        self._sizes = sizes
        self._prepare = prepare
        self.made = 0
        self._largest = 0
        self._free: list[np.ndarray] = []
        self._loans: dict[int, _Loan] = {}
        # A weak reference's callback runs in any thread, between any two bytecodes: `_give_back` must not lock.
        self._lock = renewed_in_children(threading.Lock())

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor."""
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        block = self._take(-(-self._sizes(count * dtype.itemsize) // _LINE) * _LINE)
        # The tensor's storage keeps this view alive; when the last tensor on it is gone, the block is free.
        view = block[:]
        loan = _Loan(view, self._give_back)
        loan.block = block
        self._loans[id(loan)] = loan
        return torch.frombuffer(view, dtype=dtype, count=count).view(shape)

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The same memory, which counts as free all the same once the last other tensor on it is gone; its storage goes
        on to the end of the block. None: it is in no block."""
        address = tensor.data_ptr()
        for block in [loan.block for loan in self._loans.values()]:
            offset = address - block.ctypes.data
            if 0 <= offset < block.nbytes:
                count = (block.nbytes - offset) // tensor.itemsize
                whole = torch.frombuffer(block, dtype=tensor.dtype, count=count, offset=offset)
                return whole.as_strided(tensor.shape, tensor.stride())
        return None

    def _give_back(self, loan: _Loan) -> None:
        del self._loans[id(loan)]
        self._free.append(loan.block)

    def blocks(self) -> list[tuple[int, int]]:
        """(address, end) of each block, in use or free; nobody else uses the pool meanwhile."""
        held = [*self._free, *(loan.block for loan in self._loans.values())]
        return [(block.ctypes.data, block.ctypes.data + block.nbytes) for block in held]

    def clear(self) -> None:
        """Free all unused blocks."""
        with self._lock:
            del self._free[:]

    @property
    def free_bytes(self) -> int:
        """Bytes in unused blocks."""
        with self._lock:
            return self._trim()

    def _take(self, size: int) -> np.ndarray:
        with self._lock:
            self._largest = max(self._largest, size)
            self._trim()
            for index in range(len(self._free) - 1, -1, -1):
                if self._free[index].nbytes == size:
                    return self._free.pop(index)
        self.made += 1
        alignment = _LARGE_PAGE if size >= _LARGE_PAGE else _LINE
        whole = np.empty(size + alignment, dtype=np.uint8)
        start = -whole.ctypes.data % alignment
        block = whole[start : start + size]
        if alignment == _LARGE_PAGE:
            self._prepare(block.ctypes.data, size)
        return block

    def _trim(self) -> int:
        """Free the oldest unused blocks until the rest is within the limit; returns the bytes that are left."""
        left = sum(block.nbytes for block in list(self._free))
        while left > max(self._most_free, 2 * self._largest):
            left -= self._free.pop(0).nbytes
        return left


def eighths(nbytes: int) -> int:
    """`nbytes` rounded up to a multiple of 1/8 of the largest power of two in it: at most 1/8 more memory."""
    step = 1 << max(0, nbytes.bit_length() - 4)
    return -(-nbytes // step) * step
