"""PyTorch's and NumPy's settings while the engine loads a model or computes; a program's own are restored after it.

Loading is thousands of short operations. PyTorch's threads spin between them, and while other programs take the cores
they wait for each other: a file of 98 MB took minutes. So PyTorch's operations run on one thread then, and the kernels,
whose own threads sleep, on as many as the caller asked for. A notebook with bfloat16 or a device as default, autocast,
or NumPy set to raise, gets the same answers as any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from threading import Thread

import numpy as np
import torch

# Set only inside `serial_pytorch`: what `torch.get_num_threads()` was outside.
_outside: ContextVar[int] = ContextVar("llm_threads", default=0)


def num_threads() -> int:
    """Of a kernel that loading calls."""
    return _outside.get() or torch.get_num_threads()


@contextmanager
def serial_pytorch() -> Iterator[None]:
    """Inside this context PyTorch computes on the calling thread alone; other threads of the program keep theirs."""
    threads = num_threads()
    token = _outside.set(threads)
    torch.set_num_threads(1)
    # The setting holds for this thread, and for every thread that computes for the first time after it.
    other = Thread(target=torch.set_num_threads, args=(threads,))
    other.start()
    other.join()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        _outside.reset(token)


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
