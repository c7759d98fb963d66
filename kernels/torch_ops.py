"""The kernels as operations of PyTorch, `torch.ops.offline_llm.*`: what torch.compile(fullgraph=True) of a layer needs.

Nothing is registered, and nothing costs, before `register()` is called. Layers go on calling the kernels directly, as
through PyTorch's dispatcher each call takes longer (kernels/README.md); only a tracer sees operations in their place.
Not among them are those that write into what they are given: attention and the KV cache, soft caps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from llm.kernels.backend import definition
from llm.kernels.cpu.backend import CpuBackend, kernel
from llm.kernels.cpu.library import Library
from llm.kernels.cpu.packed import PanelWeight
from llm.kernels.select import backend_for
from llm.platforms import select_platform

NAMESPACE = "offline_llm"
# Their arguments and results are tensors and numbers: the schema is the twin's signature.
PLAIN = (
    *("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm", "rotary_embedding", "log_softmax"),
    *("silu_and_mul", "mul_and_silu", "gelu_and_mul", "gelu", "gelu_new", "quick_gelu", "relu", "relu2"),
)
# The packed weight is spelled out; what follows it.
_PACKED = "Tensor x, Tensor data, Tensor? sums, SymInt n, SymInt k, str kind, bool rounds_input"
PRODUCTS = {
    "linear_float": "Tensor? bias=None",
    "linear_w8a8_dynamic": "Tensor scale, Tensor? bias=None",
    "linear_w8a8_static": "Tensor weight_scale, float input_scale, int input_offset, Tensor? bias=None",
    "linear_w4a8": "Tensor scale, int group_size, Tensor? bias=None",
    "linear_w8a16": "Tensor scale, Tensor? zero, int group_size, Tensor? bias=None",
    "linear_w4a16": "Tensor scale, Tensor? zero, int group_size, Tensor? bias=None",
}


@functools.cache
def register() -> torch.library.Library:
    """Define `torch.ops.offline_llm.*` for this processor's kernels, and have tracers use them; once per process.

    The operations keep what the kernels promise, bit for bit. They have fake kernels and no derivatives. The first call
    imports PyTorch's compiler, about a second. Without compiled kernels they are the twins in PyTorch.
    """
    backend = backend_for(select_platform("cpu")[0])
    library = torch.library.Library(NAMESPACE, "DEF")
    for name in PLAIN:
        twin = definition(name)
        library.define(torch.library.infer_schema(twin, mutates_args=(), op_name=name))
        library.impl(name, backend.op(name), "CPU")
        torch.library.register_fake(f"{NAMESPACE}::{name}", _contiguous(twin), lib=library)
    if not isinstance(backend, CpuBackend):
        return library
    for name, rest in PRODUCTS.items():
        library.define(f"{name}({_PACKED}, {rest}) -> Tensor")
        library.impl(name, _product(backend.op(name), backend.library), "CPU")
        torch.library.register_fake(f"{NAMESPACE}::{name}", _fake_product, lib=library)
    for name in (*PLAIN, *PRODUCTS):
        _substitute(name)
    return library


def _contiguous(twin: Callable[..., Any]) -> Callable[..., Any]:
    """What the twin computes, without gaps as kernels leave it."""
    return lambda *arguments: tree_map(torch.Tensor.contiguous, twin(*arguments))


def _product(kernel: Callable[..., torch.Tensor], library: Library) -> Callable[..., torch.Tensor]:
    def product(x: Any, data: Any, sums: Any, n: int, k: int, kind: str, rounds: bool, *rest: Any) -> torch.Tensor:
        return kernel(x, PanelWeight(data, n, k, kind, library, sums, rounds_input=rounds), *rest)

    return product


def _fake_product(x: torch.Tensor, data: Any, sums: Any, n: int, *rest: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], n))


def _substitute(name: str) -> None:
    """Have a tracer that meets the kernel record the operation."""
    operation = getattr(getattr(torch.ops, NAMESPACE), name).default
    if name in PRODUCTS:

        def traced(library: Any, x: Any, packed: Any, *rest: Any, **named: Any) -> Any:
            fields = packed.data, packed.sums, packed.n, packed.k, packed.kind, packed.rounds_input
            return operation(x, *fields, *rest, **named)
    else:

        def traced(library: Any, *arguments: Any, **named: Any) -> Any:  # type: ignore[misc]
            return operation(*arguments, **named)

    torch.compiler.substitute_in_graph(kernel(name), skip_signature_check=True)(traced)
