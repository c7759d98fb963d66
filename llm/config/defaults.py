"""Resets the defaults of PyTorch and NumPy that a program may have changed while the engine runs.

Owns the one context manager. A notebook with bfloat16 or a device as default, autocast, or NumPy set to raise, gets the
same answers as any other. Its settings are restored after each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch


@contextmanager
def library_defaults(num_threads: int | None = None) -> Iterator[None]:
    """float32 and the CPU for new tensors, no autocast, NumPy's default warnings; restores the old settings at the end.

    Args:
        num_threads: number of threads inside the context; None: PyTorch's setting.
    """
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    with ExitStack() as stack:
        stack.enter_context(np.errstate(divide="warn", over="warn", invalid="warn", under="ignore"))
        if num_threads is not None and num_threads != threads:
            torch.set_num_threads(num_threads)
            stack.callback(torch.set_num_threads, threads)
        if dtype != torch.float32:
            torch.set_default_dtype(torch.float32)
            stack.callback(torch.set_default_dtype, dtype)
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        if torch.is_autocast_enabled("cpu"):
            stack.enter_context(torch.autocast("cpu", enabled=False))
        yield
