"""`CustomOp` and `PluggableLayer` where the documentation has them, and `KernelOp`, a CustomOp computed by the backend.

The first two are a re-export of `llm.base.custom_op`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from llm.base.construction import Construction, constructing_for, construction
from llm.base.custom_op import (
    Binding,
    CustomOp,
    PluggableLayer,
    Replaceable,
    check_registered,
    op_registry,
    op_registry_oot,
    replaced_class,
    replacement_reason,
)
from llm.base.watch import is_watched
from llm.kernels.backend import Operations
from llm.kernels.reference.backend import REFERENCE
from llm.kernels.select import backend_of_construction

__all__ = [
    "Binding",
    "Construction",
    "CustomOp",
    "PluggableLayer",
    "Replaceable",
    "check_registered",
    "constructing_for",
    "construction",
    "is_watched",
    "op_registry",
    "op_registry_oot",
    "replaced_class",
    "replacement_reason",
]


_KERNELS = ("forward_cpu", "forward_cuda", "forward_xpu", "forward_tpu", "forward_oot")


class KernelOp(CustomOp):
    """A CustomOp written once, in `compute`.

    `forward_native` is `compute` with the definitions in PyTorch. `forward_cpu`, `forward_cuda` and the others are
    `compute` with the operations of the platform's backend, on its device; if it has a kernel for none of them,
    `forward_native` is bound. A subclass may override any `forward_*`.

    Attributes:
        operations: names of the operations that `compute` calls.
        backend: the backend of the model under construction.
    """

    operations: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *, enforce_enable: bool = False, compile_native: bool = True) -> None:
        super().__init__(enforce_enable=enforce_enable, compile_native=compile_native)
        self.backend = backend_of_construction()

    def compute(self, ops: Operations, *args: Any, **kwargs: Any) -> Any:
        """Compute `forward` with the operations of `ops`; by default, call the first of `operations`."""
        return getattr(ops, self.operations[0])(*args, **kwargs)

    def forward_native(self, *args: Any, **kwargs: Any) -> Any:
        return self.compute(REFERENCE.ops, *args, **kwargs)

    def forward_cpu(self, *args: Any, **kwargs: Any) -> Any:
        return self.compute(self.backend.ops, *args, **kwargs)

    forward_cuda = forward_xpu = forward_tpu = forward_oot = forward_cpu

    def declines(self, method: str) -> str | None:
        if not self._is_own(method) or any(self.backend.computes(name) for name in self.operations):
            return None
        return f"no CPU kernels: {self.backend.reason}" if method == "forward_cpu" else f"no {method}"

    def _is_own(self, method: str) -> bool:
        """True if `method` is `compute`: no subclass overrides it."""
        return getattr(type(self), method) is getattr(KernelOp, method)

    def _bind(self) -> None:
        super()._bind()
        method, variant = self.binding.method, self.backend.variant
        if method in _KERNELS and self._is_own(method) and variant:
            self.binding = replace(self.binding, reason=f"{self.binding.reason} {variant}")

    def _bound(self, method: str) -> Callable[..., Any]:
        if not self._is_own(method):
            return super()._bound(method)
        # Calling the method would only add a frame.
        return partial(self.compute, REFERENCE.ops if method == "forward_native" else self.backend.ops)
