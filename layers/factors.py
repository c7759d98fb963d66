"""Constants that multiply the columns of a matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llm.base.watch import Patchable
from llm.kernels.select import backend_of_construction


class ColumnFactors(Patchable):
    """float32 [N, width] -> the same, each column times its constant.

    Args:
        runs: (how many columns, their constant), one run after another.
    """

    factors: torch.Tensor

    def __init__(self, runs: Sequence[tuple[int, float]]) -> None:
        super().__init__()
        self.register_buffer(
            "factors", torch.cat([torch.full((count,), value) for count, value in runs]).float(), False
        )
        # PyTorch would share it among its own threads.
        self._multiply = backend_of_construction().op("multiply")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x, self.factors.expand_as(x))
