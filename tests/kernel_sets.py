"""The compiled kernels that this machine can run, one set per instruction set, for tests that run on all of them."""

from __future__ import annotations

import os
from functools import lru_cache

import pytest

from llm.kernels.cpu import build
from llm.kernels.cpu.backend import CpuBackend
from llm.kernels.cpu.library import choose_target, load_library, requested_isa


def has_compiler() -> bool:
    try:
        build.find_compiler()
    except build.BuildError:
        return False
    return True


def has_kernels() -> bool:
    """True if an `LLM` on this machine uses compiled kernels: packaged ones, or those that it compiles."""
    isa = requested_isa()
    return isa != "none" and (has_compiler() or build.packaged_library(choose_target(isa)[0]) is not None)


# Of a test that compares the bits of an answer in two batches, or is about the kernels themselves.
needs_kernels = pytest.mark.skipif(
    not has_kernels(), reason="without compiled kernels the bits of an answer depend on its batch"
)
needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler on this machine")
_SUPPORTED, _BEST = build.supported_targets(), build.fast_targets()[-1]
# Compiling one takes most of a minute of one core, so targets between AVX2 and the best are tested only with
# TEST_ALL_ISAS=1: set it when you change a kernel.
TARGETS = [
    target for target in _SUPPORTED if target in {"plain", "avx2", _BEST} or os.environ.get("TEST_ALL_ISAS") == "1"
]
# avx512 stands for its fastest variant, avx2 for the one without VNNI.
ISAS = tuple(dict.fromkeys(t if t == "avx512_bf16" else t.partition("_")[0] for t in TARGETS))


@lru_cache
def kernel_set(isa: str) -> CpuBackend:
    return CpuBackend(load_library(choose_target(isa)[0]), "a test asked for it")
