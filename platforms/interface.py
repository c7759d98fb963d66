"""What the engine asks of a platform.

Owns `Platform`, the base of the built-in platforms. Does not own kernels: those are chosen by `CustomOp`.
"""

from __future__ import annotations

from enum import Enum, auto

import torch


class PlatformEnum(Enum):
    """The kinds of platform, as vLLM names them."""

    CUDA = auto()
    ROCM = auto()
    TPU = auto()
    XPU = auto()
    CPU = auto()
    OOT = auto()
    UNSPECIFIED = auto()


class Platform:
    """One kind of device. Methods that a platform does not have raise AttributeError, never return None."""

    kind: PlatformEnum = PlatformEnum.UNSPECIFIED
    device_type: str = ""
    # The suffix of the `forward_*` method that a CustomOp binds here.
    dispatch_key: str = "native"

    def device_name(self) -> str:
        raise NotImplementedError

    def memory_total(self) -> int:
        """Bytes the process may use at most, limits of its container included."""
        raise NotImplementedError

    def memory_free(self) -> int:
        """Bytes that can still be allocated without swapping or being killed."""
        raise NotImplementedError

    def supported_dtypes(self) -> tuple[torch.dtype, ...]:
        """Activation types, the preferred one first."""
        raise NotImplementedError

    def release_memory(self) -> None:
        """Give what was freed back to the operating system."""
