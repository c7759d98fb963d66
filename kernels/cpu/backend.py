"""The C++ kernels as a backend: one per instruction set, or PyTorch if the kernels cannot be compiled."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from llm.base import system
from llm.kernels.backend import OPERATIONS, Backend, NotRecordable, Operation, PartFunction, PartResults, StepSize
from llm.kernels.cpu import build
from llm.kernels.cpu.gather import MappedMemory
from llm.kernels.cpu.library import Library, choose_target, load_library, requested_isa
from llm.kernels.cpu.packed import RowPanels, arriving_rows
from llm.kernels.cpu.program import AnySize, Recorded, record
from llm.kernels.reference.backend import pytorch
from llm.kernels.weight import SCALED_KINDS
from llm.platforms.interface import Platform

# Operation -> the module here that has its function, where that is not named as in `OPERATIONS`.
_MODULES = {"pack": "packed"}
# Measured on SmolLM2-135M in bfloat16, one thread with AVX-512: prompts 3.5 times the CPU time, decode 5.5 to 6.6.
PYTORCH_IS = "3 to 7 times slower"
# Target -> how many times as fast GEMMs of many rows are on activations rounded to bfloat16 (docs/reference/speed.md).
_BF16_GAINS = {"avx512_bf16": 1.9, "amx": 1.5}
# Target -> the kinds of weights whose GEMMs round activations. AMX multiplies panels of bfloat16 alone.
_ROUNDED = {"avx512_bf16": frozenset(("bfloat16", *SCALED_KINDS)), "amx": frozenset(("bfloat16",))}
# What a compiler knows that does not know a target.
_NEXT_BEST = {"amx": "avx512_vnni", "avx512_bf16": "avx512_vnni", "avx2_vnni": "avx2", "neon_i8mm": "neon"}
# Of the program for steps of any size.
MOST_TOKENS, MOST_ROWS = Platform.batched_tokens, 64
# It is made of two recordings, of at least so many tokens and of a few of them.
_LEAST_TOKENS, _FEW_TOKENS = 8, 5
# With more tokens, the time between kernels is small compared to theirs.
_MOST_OWN_TOKENS = 64


class CpuBackend(Backend):
    """The kernels of one loaded library.

    Attributes:
        library: the shared library; used only inside `llm.kernels`.
    """

    name = "cpu"
    records = True
    stops = True
    offloads = system.deletes_open_files()
    activations = (torch.float32,)

    def __init__(self, library: Library, reason: str) -> None:
        functions = {name: kernel(name) for name in OPERATIONS}
        super().__init__(
            {name: functools.partial(own, library) for name, own in functions.items() if own is not None}, reason
        )
        self.library = library
        self.variant = library.target
        self.rounds_bf16_inputs = _ROUNDED.get(library.target, frozenset())
        self.bf16_gain = _BF16_GAINS.get(library.target, 1.0)

    def shared_memory(self, rank: int, ranks: int, file: Path, timeout_s: float) -> MappedMemory:
        return MappedMemory(self.library, rank, ranks, file, timeout_s)

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

    def step_sizes(self, tokens: int, rows: int, tokens_per_row: int) -> Sequence[tuple[StepSize, int | None]]:
        return _step_sizes(tokens, rows, tokens_per_row, torch.get_num_threads())

    def record(
        self,
        compute: Callable[[int], Sequence[torch.Tensor]],
        tokens: int = 0,
        size: StepSize | None = None,
        fill: Callable[[int], None] | None = None,
    ) -> Recorded:
        most = 0 if size is None or size.tokens_per_row else size.tokens
        results: Sequence[torch.Tensor] | None = None
        try:
            with record(self.library, tokens if most else 0, most) as large:
                results = compute(tokens)
            if not most:
                return Recorded(results, large)
            with record(self.library, _FEW_TOKENS, most, like=large) as small:  # runs no kernels
                compute(_FEW_TOKENS)
            return Recorded(results, AnySize(small, large))
        except NotRecordable as reason:
            return Recorded(results or (), None, str(reason))
        except (IndexError, RuntimeError, ValueError) as reason:
            if results is None:
                raise
            # A model that reads the rows' lengths does not fit a few of their tokens.
            return Recorded(results, None, f"{type(reason).__name__}: {reason}")

    def record_part(self, key: Hashable, function: PartFunction, arguments: Sequence[object]) -> PartResults:
        recorder = self.library.recorder
        return function(*arguments) if recorder is None else recorder.part(key, function, arguments)


@functools.lru_cache(maxsize=256)
def _step_sizes(tokens: int, rows: int, tokens_per_row: int, threads: int) -> Sequence[tuple[StepSize, int | None]]:
    """A program for each size of small decode steps that comes twice, and one for steps of any size."""
    sizes: list[tuple[StepSize, int | None]] = []
    has_own = tokens_per_row > 0 and tokens <= _MOST_OWN_TOKENS
    if has_own:
        sizes.append((StepSize(tokens, rows, tokens_per_row, threads), min(1, tokens - 1)))
    if 1 < tokens <= MOST_TOKENS and rows <= MOST_ROWS:
        # Recording takes little longer than computing: the first step like this is recorded.
        after = 0 if tokens >= _LEAST_TOKENS and not has_own else None
        sizes.append((StepSize(MOST_TOKENS, MOST_ROWS, 0, threads), after))
    return sizes


def kernel(name: str) -> Operation | None:
    """The function of an operation: its arguments are the library, then those of the definition. None: there is none.

    It is in the module here that is named as the definition's, unless `_MODULES` names another.
    """
    module = f"llm.kernels.cpu.{_MODULES.get(name, OPERATIONS[name])}"
    return getattr(importlib.import_module(module), name, None) if find_spec(module) else None


def _from_best(best: str) -> Iterator[str]:
    """The target that is wanted, then what may be there if it is not: gcc before 11 knows no AMX, some systems deny it,
    and a wheel from another machine may carry a slower one where there is no compiler."""
    target: str | None = best
    while target is not None:
        yield target
        target = _NEXT_BEST.get(target)
    yield from (target for target in reversed(build.fast_targets()) if build.packaged_library(target))


@functools.cache
def _cpu_backend(isa: str | None) -> Backend:
    best, reason = choose_target(isa)
    failure = ""
    for target in [best] if isa else _from_best(best):
        try:
            return CpuBackend(load_library(target), reason)
        except build.BuildError as error:
            failure = failure or str(error)
        reason = f"{best} is not available: {failure.splitlines()[0]}"
    warnings.warn(
        f"the CPU kernels are not available, and PyTorch's operations compute instead: {PYTORCH_IS}, and answers "
        f"depend on what else is in the batch (llm.config.invariant is False). {failure}",
        stacklevel=2,
    )
    return pytorch(failure.splitlines()[0])
