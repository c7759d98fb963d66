"""Stacked matrices whose rows a checkpoint stores head by head."""

from __future__ import annotations

from typing import Any

import torch

from llm.layers.linear import MergedColumnParallelLinear, by_head


class StackedByHead(MergedColumnParallelLinear):
    """A checkpoint's tensor has one head's part of each matrix, then the next head's; here they are stacked.

    Without a bias.

    Args:
        heads: of the whole model.
        Further arguments: `MergedColumnParallelLinear`.
    """

    stored_by_key_head = True

    def __init__(self, input_size: int, output_sizes: list[int], heads: int, **kwargs: Any) -> None:
        super().__init__(input_size, output_sizes, False, **kwargs)
        self.heads = heads

    def restacked(self, loaded: torch.Tensor, dim: int) -> torch.Tensor:
        """The tensor with the rows, along `dim`, of one matrix after another."""
        length = loaded.shape[dim] if loaded.dim() > dim else 0
        total = self.output_size * self.heads
        if length == 0 or any(size * length % total for size in self.output_sizes) or length % self.heads:
            raise ValueError(f"has shape {list(loaded.shape)}, the model needs {self.heads} heads")
        parts = loaded.unflatten(dim, (self.heads, length // self.heads)).split_with_sizes(
            [size * length // total for size in self.output_sizes], dim=dim + 1
        )
        return torch.cat([part.flatten(dim, dim + 1) for part in parts], dim=dim)

    def as_stored_together(self, rows: torch.Tensor) -> torch.Tensor:
        """The opposite, of a rank that has all heads: rows along the first dimension."""
        return by_head(rows, self.output_sizes, self.heads)
