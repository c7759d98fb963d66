"""Which implementation of each operation a platform computes with: the one place where layers find kernels.

Owns the table of operations and `KernelSet`. An operation has one name and one signature; `kernels/reference` defines
it in plain PyTorch, `kernels/cpu` computes it in C++. Layers and quantization methods take a set when they are
constructed and keep the functions.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llm.kernels.cpu import build
from llm.kernels.cpu.library import Library, choose_target, load_library, requested_isa
from llm.platforms.interface import Platform, PlatformEnum

# Operation -> (its module in kernels/reference, its module in kernels/cpu or None while there is no kernel).
# A kernel is the function of the same name, with the library it runs in as an additional first argument.
OPERATIONS: dict[str, tuple[str, str | None]] = {
    "pack_float": ("quantized", "packed"),
    "pack_int8": ("quantized", "packed"),
    "pack_int4": ("quantized", "packed"),
    "linear_float": ("linear", "linear"),
    "embedding_float": ("linear", "linear"),
    "quantize_per_token": ("quantized", "quantized"),
    "quantize_static": ("quantized", "quantized"),
    "linear_w8a8_dynamic": ("quantized", "quantized"),
    "linear_w8a8_static": ("quantized", "quantized"),
    "linear_w4a8": ("quantized", "quantized"),
    "linear_w8a16": ("quantized", "quantized"),
    "linear_w4a16": ("quantized", "quantized"),
    "embedding_int8": ("quantized", "quantized"),
    "rms_norm": ("norm", "norm"),
    "add_rms_norm": ("norm", "norm"),
    "layer_norm": ("norm", "norm"),
    "add_layer_norm": ("norm", "norm"),
    "rotary_embedding": ("rotary", "rotary"),
    "kv_cache_shapes": ("attention", "attention"),
    "write_kv_cache": ("attention", "attention"),
    "paged_attention": ("attention", "attention"),
    "silu_and_mul": ("activation", "activation"),
    "mul_and_silu": ("activation", "activation"),
    "gelu_and_mul": ("activation", "activation"),
    "gelu": ("activation", "activation"),
    "gelu_new": ("activation", "activation"),
    "quick_gelu": ("activation", "activation"),
    "relu": ("activation", "activation"),
    "relu2": ("activation", "activation"),
    "soft_cap": ("activation", "activation"),
    "log_softmax": ("vocabulary", "vocabulary"),
    "argmax": ("vocabulary", "vocabulary"),
    "top_k": ("vocabulary", "vocabulary"),
    "gather_logprobs": ("vocabulary", "vocabulary"),
    "block_sums": ("vocabulary", "vocabulary"),
    "draw_nucleus": ("vocabulary", "vocabulary"),
    "cut_below_largest": ("vocabulary", "vocabulary"),
}


@dataclass(frozen=True)
class KernelSet:
    """The implementations of one platform.

    Attributes:
        library: the compiled CPU kernels; None: plain PyTorch computes everything.
        reason: why this set was chosen, or why there are no kernels.
    """

    library: Library | None
    reason: str

    def op(self, name: str) -> Callable[..., Any]:
        """The best implementation of the operation `name`; KeyError for a name that is not in `OPERATIONS`."""
        reference, cpu = OPERATIONS[name]
        if self.library is None or cpu is None:
            return getattr(importlib.import_module(f"llm.kernels.reference.{reference}"), name)
        kernel = getattr(importlib.import_module(f"llm.kernels.cpu.{cpu}"), name)
        return functools.partial(kernel, self.library)

    def source(self, name: str) -> str:
        """What `op(name)` is, for explanations: "cpu kernel avx512_vnni" or "PyTorch"."""
        has_kernel = self.library is not None and OPERATIONS[name][1] is not None
        return f"cpu kernel {self.library.target}" if has_kernel and self.library else "PyTorch"

    @property
    def invariant(self) -> tuple[bool, str]:
        """Whether every operation's bits are independent of the batch, and why (not)."""
        if self.library is None:
            return False, f"PyTorch's own operations compute, their rounding depends on the batch: {self.reason}"
        missing = [name for name, (_, cpu) in OPERATIONS.items() if cpu is None]
        if missing:
            return False, f"PyTorch computes {', '.join(missing)}: rounding depends on the batch"
        return True, f"cpu kernels {self.library.target} reduce in one fixed order"


REFERENCE = KernelSet(None, "plain PyTorch was asked for")


def kernels_for(platform: Platform | None) -> KernelSet:
    """The kernels of `platform`, compiled now if need be; None: the reference operations.

    When they cannot be compiled, one warning says how to fix it and PyTorch computes.
    """
    if platform is None or platform.kind is not PlatformEnum.CPU:
        return REFERENCE
    isa = requested_isa()
    if isa == "none":
        return KernelSet(None, "LLM_CPU_ISA=none")
    return _cpu_kernels(isa)


_NEXT_BEST = {"amx": "avx512", "avx2_vnni": "avx2"}


@functools.cache
def _cpu_kernels(isa: str | None) -> KernelSet:
    target, reason = choose_target(isa)
    try:
        return KernelSet(load_library(target), reason)
    except build.BuildError as error:
        if target in _NEXT_BEST and isa is None:  # gcc before 11 knows neither, some systems do not grant amx
            next_best, _ = choose_target(_NEXT_BEST[target])
            with contextlib.suppress(build.BuildError):  # its reason is the same, and said below
                return KernelSet(load_library(next_best), f"{target} is not available: {str(error).splitlines()[0]}")
        warnings.warn(
            f"the CPU kernels are not available: {error}. PyTorch's operations compute instead: slower, and answers "
            "depend on what else is in the batch.",
            stacklevel=2,
        )
        return KernelSet(None, str(error).splitlines()[0])
