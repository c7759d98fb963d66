"""Over the vocabulary, in C++; `kernels/reference/vocabulary.py` defines it."""

from __future__ import annotations

import torch

from llm.kernels.cpu.library import INT, POINTER, Library
from llm.kernels.cpu.tensors import as_float32

_LOG_SOFTMAX = (POINTER, POINTER, INT, INT, INT)


def log_softmax(library: Library, logits: torch.Tensor) -> torch.Tensor:
    """float [n, vocab] -> float32 [n, vocab]."""
    logits = as_float32(logits)
    out = torch.empty_like(logits)
    rows, width = logits.shape
    library.function("llm_log_softmax", *_LOG_SOFTMAX)(
        logits.data_ptr(), out.data_ptr(), rows, width, torch.get_num_threads()
    )
    return out
