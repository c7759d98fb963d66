"""Threads while a model is loaded: PyTorch's operations run on one, the kernels on as many as the caller asked for.

Loading is thousands of short operations. PyTorch's threads spin between them, and while other programs take the cores
they wait for each other: a file of 98 MB took minutes. The kernels' own threads sleep then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Thread

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
    _set_of_this_thread(1, threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        _outside.reset(token)


def _set_of_this_thread(count: int, others: int) -> None:
    """`torch.set_num_threads` holds for this thread, and for every thread that computes for the first time after it."""
    torch.set_num_threads(count)
    other = Thread(target=torch.set_num_threads, args=(others,))
    other.start()
    other.join()
