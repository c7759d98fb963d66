"""The kernels of the platform that the model under construction computes on: what layers take when they are made."""

from __future__ import annotations

from llm.kernels.select import KernelSet, kernels_for
from llm.layers.custom_op import CustomOp, construction


def platform_kernels() -> KernelSet:
    """Those of the construction in progress; outside of one the definitions in PyTorch."""
    return kernels_for(construction().platform)


class KernelOp(CustomOp):
    """A CustomOp whose `forward_cpu` calls compiled kernels; without them `forward_native` is bound.

    Attributes:
        kernels: where `forward_cpu` finds its functions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels = platform_kernels()

    def declines(self, method: str) -> str | None:
        if method == "forward_cpu" and self.kernels.library is None:
            return f"no CPU kernels: {self.kernels.reason}"
        return None
