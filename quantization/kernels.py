"""The quantized operations of the platform that the model under construction computes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llm.base.construction import construction
from llm.kernels.reference import quantized
from llm.kernels.select import OPERATIONS, kernels_for


def quantized_op(name: str) -> Callable[..., Any]:
    """The best implementation of an operation of `llm.kernels.reference.quantized`; taken when a layer is made."""
    if name in OPERATIONS:
        return kernels_for(construction().platform).op(name)
    return getattr(quantized, name)


def has_kernel(name: str) -> bool:
    """Whether `quantized_op(name)` is a compiled kernel, whose bits do not depend on the batch."""
    kernels = kernels_for(construction().platform)
    return kernels.library is not None and name in OPERATIONS and OPERATIONS[name][1] is not None


def computed_by(name: str) -> str:
    """What `quantized_op(name)` is, for explanations: "cpu kernel avx512_vnni" or "PyTorch"."""
    return kernels_for(construction().platform).source(name) if name in OPERATIONS else "PyTorch"
