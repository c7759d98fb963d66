"""Attention whose output is multiplied by the sigmoid of a gate, which is projected with the queries."""

from __future__ import annotations

import torch

from llm.kernels.select import backend_of_construction
from llm.layers.linear import QKVParallelLinear


class GatedQKVParallelLinear(QKVParallelLinear):
    """Queries, gates, keys and values, stacked. A rank has its heads' queries, then their gates.

    A checkpoint's query matrix has each head's query and, behind it, the head's gate. Arguments are those of
    `QKVParallelLinear`, where queries and gates count as heads.
    """

    def shard_restacked(self, loaded: torch.Tensor, dim: int, shard_id: str) -> torch.Tensor:
        """A checkpoint's tensor of one shard with its rows, along `dim`, in this layer's order."""
        return self._exchanged(loaded, dim, (self.tp_size, self.num_heads // 2, 2)) if shard_id == "q" else loaded

    def as_stored(self, rows: torch.Tensor, shard_id: str) -> torch.Tensor:
        """The opposite, of a rank that has all heads."""
        return self._exchanged(rows, 0, (1, 2, self.num_heads // 2)) if shard_id == "q" else rows

    def _exchanged(self, rows: torch.Tensor, dim: int, sizes: tuple[int, int, int]) -> torch.Tensor:
        count = sizes[0] * sizes[1] * sizes[2]
        if rows.dim() <= dim or rows.shape[dim] % count:
            raise ValueError(f"has shape {list(rows.shape)}, the model needs {count} heads of queries and gates")
        by_head = rows.unflatten(dim, (*sizes, rows.shape[dim] // count))
        return by_head.transpose(dim + 1, dim + 2).flatten(dim, dim + 3)


class OutputGate:
    """float32 x and gate [N, width], rows of any stride -> x * sigmoid(gate)."""

    def __init__(self) -> None:
        self._gate = backend_of_construction().op("gated_rms_norm")

    def __call__(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return self._gate(x, gate, None, 0.0, activation="sigmoid")
