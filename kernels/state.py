"""Whether the CPU kernels are compiled, for `python -m llm doctor`, and the folder they are in. Compiles nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from llm.base import system
from llm.errors import LLMError
from llm.kernels.cpu import build
from llm.kernels.cpu.backend import PYTORCH_IS
from llm.kernels.cpu.library import choose_target, requested_isa


@dataclass(frozen=True)
class KernelState:
    """`targets`: the instruction sets of this processor, the best last, without those that are slower than the one
    before them. `todo`: what to do; "": nothing is wrong.

    `is_compiled`: the next model compiles nothing.
    """

    targets: tuple[str, ...]
    text: str
    todo: str = ""
    is_compiled: bool = True


def kernel_state() -> KernelState:
    """The state of the kernels that the next model would use."""
    targets = tuple(build.fast_targets())
    try:
        isa = requested_isa()
        if isa == "none":
            return KernelState(targets, f"LLM_CPU_ISA=none: PyTorch's operations, {PYTORCH_IS}", "unset LLM_CPU_ISA")
        target, reason = choose_target(isa)
        if build.packaged_library(target) is not None:
            return KernelState(targets, f"{target} ({reason}), installed with the package")
        compiler = build.find_compiler()
        is_there = build.is_usable(build.cached_library(target, compiler))
    except (build.BuildError, LLMError, OSError) as error:
        text = f"not compiled, and they cannot be: PyTorch's operations are used, {PYTORCH_IS}"
        return KernelState(targets, text, f"{error}")
    state = "compiled, in the cache" if is_there else "not compiled yet: the first LLM(...) does it, in about a minute"
    return KernelState(targets, f"{target} ({reason}), {state}; compiler {Path(compiler).name}", "", is_there)


def slower_targets() -> list[str]:
    """The instruction sets of this processor that it computes slower with: they are used where they are asked for."""
    fast = build.fast_targets()
    return [target for target in build.supported_targets() if target not in fast]


def private_cache() -> Path | None:
    """The folder of compiled kernels, made if it is missing; None: there is none into which this user alone writes."""
    try:
        folder = build.cache_folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return folder if system.is_private(os.stat(folder)) else None
    except (OSError, build.BuildError):
        return None


def is_private(path: Path) -> bool:
    """True for a file that belongs to this user or root, and into which no other user can write."""
    try:
        return system.is_private(os.stat(path))
    except OSError:
        return False
