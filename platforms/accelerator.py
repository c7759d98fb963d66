"""The common base of CUDA, ROCm and XPU: devices behind a module such as `torch.cuda`.

Owns no device. The module is part of every build of torch, so no optional package is imported.
"""

from __future__ import annotations

from types import ModuleType
from typing import ClassVar

import torch

from llm.platforms.interface import Platform

LATER = "its kernels come in a later release"


class TorchAccelerator(Platform):
    """A device behind `torch.cuda` or a module like it.

    Attributes:
        build_name: the name of the torch build that supports the device.
    """

    build_name: ClassVar[str] = ""

    @classmethod
    def torch_module(cls) -> ModuleType:
        """`torch.cuda` or a module like it."""
        return torch.cuda

    @classmethod
    def is_built(cls) -> bool:
        """True if this build of torch supports the device."""
        raise NotImplementedError

    @classmethod
    def detect(cls) -> tuple[bool, str]:
        if not cls.is_built():
            return False, f"this PyTorch is built without {cls.build_name}"
        if not cls.torch_module().is_available():
            return False, f"no {cls.build_name} device is visible"
        return True, cls.torch_module().get_device_name(0)

    def why_not(self) -> str | None:
        return LATER

    def get_device_name(self, device_id: int = 0) -> str:
        return self.torch_module().get_device_name()

    def memory_total(self) -> int:
        return int(self.torch_module().mem_get_info()[1])

    def memory_free(self) -> int:
        return int(self.torch_module().mem_get_info()[0])

    def release_memory(self) -> None:
        self.torch_module().empty_cache()

    def set_device(self, index: int) -> None:
        self.torch_module().set_device(index)

    def synchronize(self) -> None:
        self.torch_module().synchronize()

    def manual_seed_all(self, seed: int) -> None:
        self.torch_module().manual_seed_all(seed)

    def is_pin_memory_available(self) -> bool:
        return True

    def supported_dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.bfloat16, torch.float16, torch.float32)
