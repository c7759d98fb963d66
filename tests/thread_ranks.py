"""Tensor parallelism in one process: ranks are threads that meet to combine results."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import torch

from llm.layers.parallel import Communicator, Rendezvous, TensorParallel
from llm.platforms.cpu import CpuPlatform

NOWHERE = Rendezvous(Path(), 0.0)


class ThreadRanks:
    """A communicator whose ranks are threads of this process."""

    def __init__(self, size: int) -> None:
        self.parts: dict[int, torch.Tensor] = {}
        self.size = size
        self.barrier = Barrier(size, timeout=600)

    def of(self, rank: int) -> TensorParallel:
        ranks = self

        class OfRank(Communicator):
            def all_gather(self, x: torch.Tensor) -> torch.Tensor:
                return torch.cat(ranks.exchange(rank, x), dim=-1)

        return TensorParallel(rank, self.size, OfRank(rank, self.size, NOWHERE, CpuPlatform()))

    def exchange(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        self.parts[rank] = x
        self.barrier.wait()
        parts = [self.parts[other] for other in range(self.size)]
        self.barrier.wait()
        return parts

    def run(self, work: Callable[[TensorParallel], Any]) -> list[Any]:
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(work, map(self.of, range(self.size))))
