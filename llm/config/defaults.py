"""Resets the defaults of PyTorch and NumPy that a program may have changed while the engine runs.

Owns the one context manager. A notebook with bfloat16 or a device as default, autocast, or NumPy set to raise, gets the
same answers as any other. Its settings are restored after each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch

_WARNINGS = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}


@contextmanager
def library_defaults(num_threads: int | None = None) -> Iterator[None]:
    """float32 and the CPU for new tensors, no autocast, NumPy's default warnings; restores the old settings at the end.

    Args:
        num_threads: number of threads inside the context; None: PyTorch's setting.
    """
    # Of a new tensor: a step asks, and `torch.get_default_device` takes microseconds.
    probe, threads = torch.empty(0), torch.get_num_threads()
    dtype, device = probe.dtype, probe.device.type
    is_default = dtype == torch.float32 and device == "cpu" and num_threads in (None, threads)
    if is_default and np.geterr() == _WARNINGS and not torch.is_autocast_enabled("cpu"):
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(np.errstate(divide="warn", over="warn", under="ignore", invalid="warn"))
        if num_threads is not None and num_threads != threads:
            torch.set_num_threads(num_threads)
            stack.callback(torch.set_num_threads, threads)
        if dtype != torch.float32:
            torch.set_default_dtype(torch.float32)
            stack.callback(torch.set_default_dtype, dtype)
        if device != "cpu":
            stack.enter_context(torch.device("cpu"))
        if torch.is_autocast_enabled("cpu"):
            stack.enter_context(torch.autocast("cpu", enabled=False))
        yield
