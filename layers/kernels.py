"""The kernels of the platform that the model under construction computes on: what layers take when they are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from llm.base.construction import construction
from llm.base.custom_op import CustomOp
from llm.kernels.select import KernelSet, kernels_for


def platform_kernels() -> KernelSet:
    """Those of the construction in progress; outside of one the definitions in PyTorch."""
    return kernels_for(construction().platform)


class KernelOp(CustomOp):
    """A CustomOp whose `forward_cpu` calls compiled kernels; without them `forward_native` is bound.

    Attributes:
        kernel_name: of the operation's one kernel, for those that have one.
        kernel: that kernel, for `forward_cpu`.
        kernels: where a `forward_cpu` of several finds them.
    """

    kernel_name: ClassVar[str] = ""
    kernel: Callable[..., Any]

    def __init__(self) -> None:
        super().__init__()
        self.kernels = platform_kernels()
        if self.kernel_name:
            self.kernel = self.kernels.op(self.kernel_name)

    def _bind(self) -> None:
        super()._bind()
        if self.binding.method == "forward_cpu" and self.kernels.library is not None:
            reason = f"{self.binding.reason} {self.kernels.library.target}"
            self.binding = replace(self.binding, reason=reason)

    def declines(self, method: str) -> str | None:
        if method == "forward_cpu" and self.kernels.library is None:
            return f"no CPU kernels: {self.kernels.reason}"
        return None
