"""The norm of queries or keys where each head has its own weight."""

from __future__ import annotations

import torch
from torch import nn

from llm.base.watch import Patchable
from llm.kernels.select import backend_of_construction
from llm.quantization.unquantized import new_parameter


class HeadsRMSNorm(Patchable):
    """RMSNorm of each head by itself: float32 [N, heads * head_size], rows of any stride -> the same shape.

    Args:
        total_heads: of the whole model, whose weights a checkpoint has as [total_heads, head_size].
        heads: of this rank.
        part: which `heads` of them.
    """

    def __init__(
        self, total_heads: int, heads: int, head_size: int, eps: float, dtype: torch.dtype | None, part: int
    ) -> None:
        super().__init__()
        self.total_heads, self.heads, self.head_size, self.eps, self.part = total_heads, heads, head_size, eps, part
        self.weight = new_parameter(torch.ones(heads, head_size, dtype=dtype), self._load)
        self._norm = backend_of_construction().op("gated_rms_norm")

    def _load(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: object = None) -> int:
        """This rank's heads."""
        wanted = [self.total_heads, self.head_size]
        if list(loaded.shape) != wanted:
            raise ValueError(f"has shape {list(loaded.shape)}, the model needs {wanted}")
        param.data.copy_(loaded.narrow(0, self.part * self.heads, self.heads))
        return param.numel()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm(x, None, self.weight.view(-1), self.eps, self.heads)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, head_size={self.head_size}, eps={self.eps}"
