"""The kernels as PyTorch operations, `torch.ops.offline_llm.*`, which torch.compile(fullgraph=True) of a layer needs.

Nothing is registered before `register()` is called. Layers keep calling the kernels directly, because PyTorch's
dispatcher makes each call slower (kernels/README.md); only a tracer sees these operations. Kernels that write into
their arguments are left out: attention with the KV cache, and soft caps.
"""

from __future__ import annotations

import dataclasses
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
# Operations on tensors and numbers only: the schema is the twin's signature.
PLAIN = (
    *("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm", "rotary_embedding", "log_softmax"),
    *("silu_and_mul", "mul_and_silu", "gelu_and_mul", "silu", "gelu", "gelu_new", "quick_gelu", "relu", "relu2"),
)
# Operations with a weight -> the schema of their first argument; the fields of the weight are the other arguments.
WITH_WEIGHT = {"linear": "Tensor x", "embedding": "Tensor token_ids"}
_FIELDS = [item for item in dataclasses.fields(PanelWeight) if item.init and item.name != "library"]
_NAMES = [item.name for item in _FIELDS]
_SCHEMA_TYPES = {
    "torch.Tensor": "Tensor",
    "torch.Tensor | None": "Tensor?",
    "int": "SymInt",
    "float": "float",
    "str": "str",
}


@functools.cache
def register() -> torch.library.Library:
    """Define `torch.ops.offline_llm.*` for this processor's kernels, and make tracers use them; once per process.

    The operations give the kernels' bits. They have fake kernels and no autograd formulas. The first call imports
    PyTorch's compiler, which takes about a second. Without compiled kernels the twins in PyTorch are registered.
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
    fields = ", ".join(f"{_SCHEMA_TYPES[str(item.type)]} {item.name}" for item in _FIELDS)
    for name, first in WITH_WEIGHT.items():
        library.define(f"{name}({first}, {fields}) -> Tensor")
        library.impl(name, _of_fields(backend.op(name), backend.library), "CPU")
        torch.library.register_fake(f"{NAMESPACE}::{name}", _FAKES[name], lib=library)
    for name in (*PLAIN, *WITH_WEIGHT):
        _substitute(name)
    return library


def _contiguous(twin: Callable[..., Any]) -> Callable[..., Any]:
    """The twin with contiguous results, like the kernel's."""
    return lambda *arguments: tree_map(torch.Tensor.contiguous, twin(*arguments))


def fields_of(weight: PanelWeight) -> tuple[Any, ...]:
    """The arguments that an operation takes in place of a weight."""
    return tuple(getattr(weight, name) for name in _NAMES)


def _of_fields(operation: Callable[..., torch.Tensor], library: Library) -> Callable[..., torch.Tensor]:
    def with_fields(x: torch.Tensor, *values: Any) -> torch.Tensor:
        return operation(x, PanelWeight(**dict(zip(_NAMES, values, strict=True)), library=library))

    return with_fields


def _fake_linear(x: torch.Tensor, *values: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], values[_NAMES.index("n")]))


def _fake_embedding(ids: torch.Tensor, *values: Any) -> torch.Tensor:
    return ids.new_empty((*ids.shape, values[_NAMES.index("k")]), dtype=torch.float32)


_FAKES = {"linear": _fake_linear, "embedding": _fake_embedding}


def _substitute(name: str) -> None:
    """Make a tracer that reaches the kernel record the operation instead; a definition is traced as it is."""
    own = kernel(name)
    if own is None:
        return
    operation = getattr(getattr(torch.ops, NAMESPACE), name).default
    if name in WITH_WEIGHT:

        def traced(library: Any, x: Any, weight: PanelWeight) -> Any:
            return operation(x, *fields_of(weight))
    else:

        def traced(library: Any, *arguments: Any, **named: Any) -> Any:  # type: ignore[misc]
            return operation(*arguments, **named)

    torch.compiler.substitute_in_graph(own, skip_signature_check=True)(traced)
