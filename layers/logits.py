"""From hidden states to logits."""

from __future__ import annotations

import torch
from torch import nn

from llm.layers.embedding import VocabParallelEmbedding


class LogitsProcessor(nn.Module):
    """hidden [L, H] -> float32 logits [L, vocab], through the LM head's quant method.

    Args:
        divisor: the logits are divided by it.
        soft_cap: then capped: soft_cap * tanh(logits / soft_cap); None: not.
    """

    def __init__(self, divisor: float = 1.0, soft_cap: float | None = None) -> None:
        super().__init__()
        self.divisor = divisor
        self.soft_cap = soft_cap

    def forward(self, lm_head: VocabParallelEmbedding, hidden: torch.Tensor) -> torch.Tensor:
        logits = lm_head.quant_method.apply(lm_head, hidden)
        if self.divisor != 1.0:
            logits /= self.divisor
        if self.soft_cap is not None:
            logits = logits.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        return logits
