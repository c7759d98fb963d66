"""The C++ kernels as a backend: one per instruction set, or PyTorch if the kernels cannot be compiled."""

from __future__ import annotations

import functools
import importlib
import warnings
from contextlib import AbstractContextManager

import torch

from llm.kernels.backend import OPERATIONS, Backend, Operation, Program
from llm.kernels.cpu import build
from llm.kernels.cpu.any_size import AnySize
from llm.kernels.cpu.arriving import RowPanels, arriving_rows
from llm.kernels.cpu.library import Library, choose_target, load_library, requested_isa
from llm.kernels.cpu.program import Program as Recording
from llm.kernels.cpu.program import record
from llm.kernels.reference.backend import pytorch
from llm.platforms.interface import Platform

# Operation -> the module here that has its function, where that is not named as in `OPERATIONS`.
_MODULES = {"pack": "packed"}
# What a compiler knows that does not know a target.
_NEXT_BEST = {"amx": "avx512_vnni", "avx512_bf16": "avx512_vnni", "avx2_vnni": "avx2", "neon_i8mm": "neon"}


class CpuBackend(Backend):
    """The kernels of one loaded library.

    Attributes:
        library: the shared library; used only inside `llm.kernels`.
    """

    name = "cpu"
    records = True
    offloads = True

    def __init__(self, library: Library, reason: str) -> None:
        super().__init__({name: functools.partial(kernel(name), library) for name in OPERATIONS}, reason)
        self.library = library
        self.variant = library.target
        # With AMX a rounded activation is one bfloat16, an exact one is the sum of three.
        self.rounds_bf16_inputs = library.multiplies_bf16

    @classmethod
    def of(cls, platform: Platform) -> Backend:
        """The kernels of the fastest instruction set of this processor, or of LLM_CPU_ISA.

        If they cannot be compiled, the PyTorch backend, with one warning that says how to fix it.
        """
        isa = requested_isa()
        return pytorch("LLM_CPU_ISA=none") if isa == "none" else _cpu_backend(isa)

    def empty(self, *shape: int) -> torch.Tensor:
        return self.library.empty(*shape)

    def arriving_rows(self, n: int, k: int, dtype: torch.dtype) -> RowPanels | None:
        return arriving_rows(self.library, n, k, dtype)

    def clear(self) -> None:
        self.library.pool.clear()
        self.library.end_threads()

    def record(self, tokens: int = 0, most: int = 0, like: Program | None = None) -> AbstractContextManager[Recording]:
        if like is not None and not isinstance(like, Recording):
            raise TypeError("`like` is a program that this backend recorded")
        return record(self.library, tokens, most, like)

    def for_any_size(self, small: Program, large: Program) -> AnySize:
        if not isinstance(small, Recording) or not isinstance(large, Recording):
            raise TypeError("both are programs that this backend recorded")
        return AnySize(small, large)


def kernel(name: str) -> Operation:
    """The function of an operation: its arguments are the library, then those of the definition."""
    return getattr(importlib.import_module(f"llm.kernels.cpu.{_MODULES.get(name, OPERATIONS[name])}"), name)


@functools.cache
def _cpu_backend(isa: str | None) -> Backend:
    best, reason = choose_target(isa)
    target: str | None = best
    failure = ""
    while target is not None:
        try:
            return CpuBackend(load_library(target), reason)
        except build.BuildError as error:
            failure = failure or str(error)
        reason = f"{best} is not available: {failure.splitlines()[0]}"
        target = _NEXT_BEST.get(target) if isa is None else None  # gcc before 11 knows no AMX, some systems deny it
    warnings.warn(
        f"the CPU kernels are not available, and PyTorch's operations compute instead: slower, and answers depend on "
        f"what else is in the batch (llm.config.invariant is False). {failure}",
        stacklevel=2,
    )
    return pytorch(failure.splitlines()[0])
