"""A float weight whose rows are packed as they arrive from a file: read once, written once, into memory of huge pages.

Owns `RowPanels`: which panels are packed, and packing the rest.
"""

from __future__ import annotations

import torch

from llm.kernels.backend import ArrivingRows
from llm.kernels.cpu.library import Library
from llm.kernels.cpu.packed import LANES, PanelWeight, allocate, is_packed_in_place, pack_into
from llm.kernels.weight import FLOAT_KINDS


class RowPanels(ArrivingRows):
    """A float weight [N, K] of which any 16 rows, from a multiple of 16 on, take the same memory packed or not."""

    def __init__(self, lib: Library, n: int, k: int, dtype: torch.dtype) -> None:
        self._library = lib
        self.data = allocate(lib, n * k, dtype).view(n, k)
        self._packed = bytearray(n // LANES)

    def take(self, start: int, values: torch.Tensor) -> bool:
        first, count = start // LANES, len(values) // LANES
        whole = start % LANES == 0 and len(values) % LANES == 0 and values.is_contiguous()
        if not whole or values.dtype != self.data.dtype or values.shape[1:] != self.data.shape[1:]:
            self._unpack(first, -(-(start + len(values)) // LANES))
            return False
        pack_into(self._library, values, self._rows(first, first + count))
        self._packed[first : first + count] = b"\1" * count
        return True

    def release(self) -> None:
        self._unpack(0, len(self._packed))

    def finish(self) -> PanelWeight:
        for first in range(len(self._packed)):
            if not self._packed[first]:
                end = self._packed.find(1, first)
                end = len(self._packed) if end < 0 else end
                pack_into(self._library, self._rows(first, end), self._rows(first, end))
                self._packed[first:end] = b"\1" * (end - first)
        return self._weight(self.data)

    def _unpack(self, first: int, end: int) -> None:
        """Panels first to end - 1 in plain rows again."""
        for panel in range(first, end):
            if self._packed[panel]:
                rows = self._rows(panel, panel + 1)
                rows.copy_(self._weight(rows).unpack())
                self._packed[panel] = 0

    def _rows(self, first: int, end: int) -> torch.Tensor:
        return self.data[first * LANES : end * LANES]

    def _weight(self, rows: torch.Tensor) -> PanelWeight:
        return PanelWeight(rows.view(-1), FLOAT_KINDS[rows.dtype], *rows.shape, library=self._library)


def arriving_rows(lib: Library, n: int, k: int, dtype: torch.dtype) -> RowPanels | None:
    """None where packed rows take more memory, or the weight is empty."""
    return RowPanels(lib, n, k, dtype) if n * k and is_packed_in_place(n, k, dtype) else None
