"""Gathering what ranks computed, in memory that their processes share (gather.cpp)."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import torch

from llm.errors import RankError
from llm.kernels.cpu.library import Library, as_float32, pointer
from llm.kernels.cpu.signatures import KERNELS

_GATHER = KERNELS["llm_gather"]
_OUT_OF_STEP, _LATE = 2, 3


class MappedMemory:
    """The memory of one group, mapped by this rank.

    Args:
        file: that all ranks map; rank 0 makes it. It may be deleted once they have.
        timeout_s: how long a rank waits for another.

    Raises:
        OSError: there is no room for it.
    """

    def __init__(self, library: Library, rank: int, ranks: int, file: Path, timeout_s: float) -> None:
        self._library, self._rank, self._ranks = library, rank, ranks
        self._timeout_s = timeout_s
        size = library.function("llm_gather_bytes")(ranks)
        with file.open("r+b" if rank else "x+b") as opened:
            if not rank:
                opened.write(bytes(size))  # not a hole: without room, this fails and no later access does
                opened.flush()
            self._map = mmap.mmap(opened.fileno(), size)
        self._address = np.frombuffer(self._map, dtype=np.uint8).ctypes.data

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [..., n] -> [..., ranks * n]; raises `RankError`."""
        return self._gathered(x, None, self._library.empty(*x.shape[:-1], x.shape[-1] * self._ranks))

    def pick(self, x: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
        """float32 [m, n], int64 [m] -> [m, n], row i of rank owners[i]; raises `RankError`."""
        owners = owners.contiguous()
        found = self._gathered(x, owners, self._library.empty(*x.shape))
        if self._library.recorder is not None:
            self._library.recorder.kept.append(owners)
        return found

    def _gathered(self, x: torch.Tensor, owners: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        x = as_float32(x)
        width = x.shape[-1]
        sizes = x.numel() // width if width else 0, width
        arguments = x.data_ptr(), pointer(owners), *sizes, out.data_ptr(), round(1000 * self._timeout_s)
        failure = self._library.call(_GATHER, self._address, self._rank, self._ranks, *arguments)
        if failure:
            raise self._error(failure)
        return out

    def _error(self, failure: int) -> RankError:
        if failure == _LATE:
            late = self._library.function("llm_late_rank")(self._address)
            return RankError(f"rank {late} did not come to a step within {self._timeout_s:g} seconds.", late)
        if failure == _OUT_OF_STEP:
            return RankError("two ranks came to a step with tensors of different shapes.")
        return RankError("another rank left the step.")

    def abort(self) -> None:
        self._library.function("llm_abort_ranks")(self._address)

    def restart(self) -> None:
        self._library.function("llm_restart_ranks")(self._address, self._ranks)
