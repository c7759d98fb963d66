"""The process's private memory: what is there, its peak between two marks, and how much of a tensor was ever touched.

Owns reading /proc; on systems without it there are no figures. File pages are not private: a memory-mapped checkpoint
counts only where it was copied.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

# Rare enough to cost a thousandth of the time, frequent enough to see what a step holds.
_SAMPLE_SECONDS = 0.05
_STATUS = Path("/proc/self/status")
_PAGEMAP = Path("/proc/self/pagemap")
_PRESENT_BIT = 63


def private_bytes() -> int | None:
    """Anonymous memory now (RssAnon)."""
    return _status_bytes("RssAnon")


def peak_resident_bytes() -> int | None:
    """Most memory ever resident, files included (VmHWM)."""
    return _status_bytes("VmHWM")


def touched_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """How much of these CPU tensors is in memory: pages never written cost nothing. Without /proc: their size."""
    return sum(_touched_bytes(tensor) for tensor in tensors)


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of private memory in one phase of a run.

    Attributes:
        imports: before anything was built.
        weights, kv_cache: of the model; of the KV cache what has been written so far.
        peak: the most there was in this phase.
    """

    imports: int
    weights: int
    kv_cache: int
    peak: int

    @property
    def overhead(self) -> int:
        """What the engine needs beside imports, weights and KV cache."""
        return self.peak - self.imports - self.weights - self.kv_cache


class MemoryLog:
    """Context manager: a thread looks at private memory now and then, and `note` closes a phase.

    Attributes:
        uses: phase name -> what it used, in order; empty where memory cannot be read.
    """

    def __init__(self, imports: int | None) -> None:
        self.uses: dict[str, MemoryUse] = {}
        self._imports = imports
        self._peak = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="memory log")

    def start_over(self) -> None:
        """Forget what was seen since the last phase."""
        self._peak = 0

    def note(self, phase: str, weights: int, kv_caches: Iterable[torch.Tensor]) -> None:
        """End a phase: the KV cache counts as far as it has been written by now, weights in full."""
        now = private_bytes()
        if self._imports is not None and now is not None:
            self.uses[phase] = MemoryUse(self._imports, weights, touched_bytes(kv_caches), max(self._peak, now))
        self.start_over()

    def __enter__(self) -> MemoryLog:
        if self._imports is not None:
            self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._stopping.wait(_SAMPLE_SECONDS):
            self._peak = max(self._peak, private_bytes() or 0)


def _status_bytes(name: str) -> int | None:
    if not _STATUS.exists():
        return None
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def _touched_bytes(tensor: torch.Tensor) -> int:
    """Counted by the page table, one 64-bit entry per page whose highest bit says that it is in memory."""
    if not _PAGEMAP.exists() or tensor.device.type != "cpu" or not tensor.nbytes:
        return tensor.nbytes
    page = os.sysconf("SC_PAGE_SIZE")
    first = tensor.data_ptr() // page
    last = (tensor.data_ptr() + tensor.nbytes - 1) // page
    with open(_PAGEMAP, "rb", buffering=0) as pagemap:
        pagemap.seek(first * 8)
        entries = np.frombuffer(pagemap.read((last - first + 1) * 8), dtype=np.uint64)
    return min(tensor.nbytes, int((entries >> np.uint64(_PRESENT_BIT)).sum()) * page)
