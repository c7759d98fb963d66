"""Over the vocabulary, in plain PyTorch."""

from __future__ import annotations

import torch


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """float [n, vocab] -> float32 [n, vocab]: logits - log(sum of e^logits)."""
    return logits.float().log_softmax(dim=-1)
