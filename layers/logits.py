"""From hidden states to logits."""

from __future__ import annotations

import torch
from torch import nn

from llm.layers.embedding import VocabParallelEmbedding


class LogitsProcessor(nn.Module):
    """hidden [L, H] -> float32 logits [L, vocab], through the LM head's quant method."""

    def forward(self, lm_head: VocabParallelEmbedding, hidden: torch.Tensor) -> torch.Tensor:
        return lm_head.quant_method.apply(lm_head, hidden)
