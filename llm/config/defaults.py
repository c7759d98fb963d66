"""What a program can have changed of PyTorch's and NumPy's defaults, put back while we work.

Owns the one context manager. A notebook that set bfloat16 or a device as default, computes under autocast, or lets
NumPy raise, gets the same answers as any other, and has its own settings again after each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch


@contextmanager
def library_defaults() -> Iterator[None]:
    """float32 and the CPU for new tensors, no autocast, and NumPy's own warnings; then again what was before."""
    dtype = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.enter_context(np.errstate(divide="warn", over="warn", invalid="warn", under="ignore"))
        if dtype != torch.float32:
            torch.set_default_dtype(torch.float32)
            stack.callback(torch.set_default_dtype, dtype)
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        if torch.is_autocast_enabled("cpu"):
            stack.enter_context(torch.autocast("cpu", enabled=False))
        yield
