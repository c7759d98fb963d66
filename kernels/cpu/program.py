"""Recording the kernel calls of one computation, to run them again without Python in between.

Owns `record` and `Program`. A program repeats the same calls on the same
addresses: what varies between runs must be written into its inputs beforehand. Whatever is not a kernel call would be
missing from the repetition, so while a program is recorded PyTorch may only allocate and make views; the few sums and
products of elementwise.py are computed by kernels in its place.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llm.kernels.backend import NotRecordable
from llm.kernels.cpu.elementwise import substitute
from llm.kernels.cpu.library import Library
from llm.kernels.cpu.memory import Pool

_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
}
# Filled once: nothing that a program runs writes into them.
_CONSTANTS = {torch.ops.aten.zeros.default, torch.ops.aten.zeros_like.default, torch.ops.aten.new_zeros.default}


class _Call(ctypes.Structure):
    """`Call` in replay.cpp."""

    _fields_ = (("replay", ctypes.c_void_p), ("slots", ctypes.c_void_p), ("expected", ctypes.c_int64))


class Program:
    """Recorded calls; `run` repeats them."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._replay = library.function("llm_replay")
        self._slots: list[Any] = []
        self._calls: list[_Call] = []
        self._compiled: Any = None
        # The calls are repeated on these addresses: nothing that was used may go.
        self._pool = Pool(sys.maxsize)
        self._owner = threading.get_ident()
        # Alive as long as the program: constants, and whatever the caller needs to be.
        self.kept: list[Any] = []

    def __len__(self) -> int:
        return len(self._calls)

    def run(self) -> bool:
        """Repeat the calls; False when one refused its arguments, after which the outputs are undefined."""
        if self._compiled is None:
            self._compiled = (_Call * len(self._calls))(*self._calls)
        return self._replay(ctypes.addressof(self._compiled), len(self._calls)) < 0

    def note(self, entry: Any, slots: bytes, result: int) -> None:
        """A call that was made, if the recording thread made it."""
        if threading.get_ident() == self._owner:
            self._slots.append(slots)  # kept where they are
            addresses = (ctypes.cast(item, ctypes.c_void_p).value for item in (entry, ctypes.c_char_p(slots)))
            self._calls.append(_Call(*addresses, result))


@contextmanager
def record(library: Library) -> Iterator[Program]:
    """The program of the kernel calls inside the context, which are made as usual.

    Raises:
        NotRecordable: something else computed.
    """
    program = Program(library)
    library.recorder = program
    try:
        with _OnlyKernels(program):
            yield program
    finally:
        library.recorder = None


class _OnlyKernels(TorchDispatchMode):
    """Raises for every operation of PyTorch that computes; places what is allocated in the program's memory."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self._program = program

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Kept out of its compiler by name, torch would import all of it at the first recording: most of a second.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        program = self._program
        own = substitute(program._library, func, args, kwargs, program._pool.empty)
        if own is not None:
            return own
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            return program._pool.empty(result.shape, result.dtype)
        if func in _CONSTANTS:
            program.kept.append(result)
            return result
        if func._schema.is_mutable or not _are_views(result, (args, kwargs)):
            raise NotRecordable(str(func))
        return result


def _are_views(result: Any, arguments: Any) -> bool:
    """Whether all tensors of `result` lie in memory of the arguments: `to` or `reshape` may give a view or a copy."""
    given = {item.untyped_storage().data_ptr() for item in tree_leaves(arguments) if isinstance(item, torch.Tensor)}
    made = [item for item in tree_leaves(result) if isinstance(item, torch.Tensor)]
    return bool(made) and all(item.untyped_storage().data_ptr() in given for item in made)
