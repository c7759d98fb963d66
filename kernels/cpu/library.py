"""The compiled kernels in this process: the instruction set, by the processor's flags or LLM_CPU_ISA, the library, and
tensors as arguments of its functions.

The library has its own threads (threads.cpp): no OpenMP runtime is linked or called.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from llm.base import system
from llm.config import env
from llm.errors import LLMError, ValidationError
from llm.kernels.cpu import build
from llm.kernels.cpu.memory import Pool, eighths
from llm.kernels.cpu.signatures import FUNCTIONS, KERNELS, Signature, mismatches
from llm.kernels.weight import FLOAT_KINDS

ISA_CHOICES = (*build.TARGETS, "none")

# Results of at least _POOLED elements use pooled memory; the pool keeps at most _MOST_FREE free bytes.
_POOLED = 1 << 18
_MOST_FREE = 32 << 20


class SignatureError(LLMError):
    """The compiled kernels differ from what `signatures` declares."""


class Library:
    """One loaded kernel library.

    Raises:
        SignatureError: a function has other arguments than `signatures` declares.

    Attributes:
        target: what it was compiled for, a key of `build.TARGETS`.
        path: the file.
        recorder: the program that records calls (program.py), or None.
        pool: the memory of large results.
        entries: signature -> the kernel, called with the bytes from the signature's `pack`.
    """

    recorder: Any = None

    def __init__(self, target: str, path: Path) -> None:
        self.target = target
        self.path = path
        self._handle = ctypes.CDLL(str(path))
        wrong = mismatches(self._handle)
        if wrong:
            self._unload()
            raise SignatureError(f"{path.name} is not loaded: {' '.join(wrong)}")
        try:
            self.entries = {kernel: kernel.bind_block(self._handle) for kernel in KERNELS.values()}
        except AttributeError as error:
            self._unload()
            raise SignatureError(f"{path.name} is not loaded: it lacks a function ({error})") from error
        self._float32 = torch.empty(0, dtype=torch.float32)
        self.pool = Pool(_MOST_FREE, eighths, self.ask_large_pages)

    def _unload(self) -> None:
        """Needed before another file with this name is loaded: the loader identifies libraries by name."""
        system.unload(self._handle._handle)

    def empty(self, *shape: int) -> torch.Tensor:
        """An uninitialised float32 tensor for a result; large ones are in pooled memory."""
        if self.recorder is not None and self.recorder.is_recording():
            return self.recorder.empty(shape, torch.float32)
        if math.prod(shape) < _POOLED:
            # Half the time of torch.empty(shape, dtype=...).
            return self._float32.new_empty(*shape) if shape else self._float32.new_empty(())
        return self.pool.empty(shape, torch.float32)

    def empty_like(self, x: torch.Tensor) -> torch.Tensor:
        """`empty` in the shape of `x`, contiguous float32."""
        return torch.empty_like(x) if x.numel() < _POOLED and self.recorder is None else self.empty(*x.shape)

    def call(self, kernel: Signature, *arguments: Any) -> int:
        """Call a kernel; returns what it returns, 0 for void.

        Python checks the number of arguments and which are floats. The caller is responsible for their order, and for
        the shape, type and lifetime of the memory they point to.
        """
        entry = self.entries[kernel]
        slots = kernel.pack(*arguments)
        return entry(slots) if self.recorder is None else self.recorder.call(entry, slots)

    def function(self, name: str) -> Callable[..., Any]:
        """The function `name`, which is no kernel: its calls are never recorded."""
        return FUNCTIONS[name].bind(self._handle)

    @property
    def has_tiles(self) -> bool:
        """True if GEMMs use AMX tiles (gemm_tiles.h)."""
        return self.target == "amx"

    @property
    def multiplies_bf16(self) -> bool:
        """True if GEMMs are faster on activations rounded to bfloat16: an instruction multiplies it."""
        return self.target in {"avx512_bf16", "amx"}

    def ask_large_pages(self, address: int, nbytes: int, written: bool = False) -> None:
        """Ask for huge pages for memory read from end to end; `written`: it holds data already (memory.cpp)."""
        self.function("llm_large_pages")(address, nbytes, written)

    def end_threads(self) -> None:
        """End the kernels' worker threads; the next call that shares work creates new ones."""
        self.function("llm_end_threads")()


def choose_target(isa: str | None, cpu_flags: set[str] | None = None) -> tuple[str, str]:
    """(target, reason) for `isa`, one of `ISA_CHOICES` except "none"; None: the fastest.

    "avx512" includes VNNI, and BF16 where it is fast, "neon" I8MM. Raises `ValidationError` for what it lacks.
    """
    supported, fast = build.supported_targets(cpu_flags), build.fast_targets(cpu_flags)
    if isa is None:
        return fast[-1], "the best this processor runs"
    with_more = tuple(f"{isa}_" for family in ("avx512", "neon") if family == isa)
    fitting = [target for target in supported if target == isa]
    fitting += [target for target in fast if target.startswith(with_more)]
    if not fitting:
        raise ValidationError(
            f"LLM_CPU_ISA={isa!r} needs instructions that this processor does not have; it runs "
            f"{', '.join(name for name in ISA_CHOICES if name in supported)}.",
            parameter="LLM_CPU_ISA",
            value=isa,
        )
    return fitting[-1], f"LLM_CPU_ISA={isa}"


@functools.cache
def load_library(target: str) -> Library:
    """The library of `target`, compiled if necessary; loaded once per process. Raises `build.BuildError`."""
    if target == "amx" and not build.request_tiles():
        raise build.BuildError("the system does not grant this process the registers of AMX; set LLM_CPU_ISA=avx512")
    path = build.ensure_library(target)
    try:
        return Library(target, path)
    except (OSError, SignatureError) as error:
        if path.parent.name == build.PACKAGED_FOLDER.name:
            raise build.BuildError(f"the packaged kernels cannot be loaded ({error})") from error
    # A cached file that cannot be loaded or lacks a function was not compiled from these sources: compile again.
    return Library(target, build.ensure_library(target, rebuild=True))


def requested_isa() -> str | None:
    """LLM_CPU_ISA: one of `ISA_CHOICES` ("none": PyTorch's operations), or None when it is not set."""
    if env.get("LLM_CPU_ISA") is None:
        return None
    return env.get_choice("LLM_CPU_ISA", ISA_CHOICES, "")


# As `Kind` (kinds.h).
KINDS = {dtype: number for number, dtype in enumerate(FLOAT_KINDS)}


def as_float32(x: torch.Tensor) -> torch.Tensor:
    """`x` as contiguous float32; `x` itself if it is that already."""
    if x.dtype == torch.float32 and x.is_contiguous():
        return x
    return x.float().contiguous()


def in_type(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A float32 result converted to `dtype`. `Tensor.to` is skipped for float32: it takes time even to do nothing."""
    return x if dtype == torch.float32 else x.to(dtype)


def pointer(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
