"""Memory for temporaries of loading a model: bytes from mmap, which the next temporary of their size or less takes.

Owns `Scratch`. Temporaries from the heap, between packed weights, would leave holes that are never reused; fresh pages
for each are cleared by the system, and some virtual machines give them back to their host in between.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref

import numpy as np
import torch

# Larger memory is not kept.
_MOST_KEPT = 256 << 20


class Scratch:
    """Memory for one tensor at a time: whoever asks while another tensor is alive gets memory of its own."""

    def __init__(self) -> None:
        self._kept: mmap.mmap | None = None
        self._taken: weakref.ref[np.ndarray] | None = None

    def empty(self, rows: int, columns: int) -> torch.Tensor:
        """int8 [rows, columns]."""
        size = rows * columns
        if size > _MOST_KEPT or (self._taken is not None and self._taken() is not None):
            return _tensor(np.frombuffer(_mapped(size), np.int8, size), rows, columns)
        if self._kept is None or len(self._kept) < size:
            self._kept = None  # freed before more is taken
            self._kept = _mapped(size)
        view = np.frombuffer(self._kept, np.int8, size)
        # The tensor's storage keeps the array alive, and nothing else does.
        self._taken = weakref.ref(view)
        return _tensor(view, rows, columns)


def _tensor(values: np.ndarray, rows: int, columns: int) -> torch.Tensor:
    return torch.from_numpy(values).view(rows, columns)


def _mapped(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without huge pages; only speed depends on it
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
