"""Intel GPUs: detected and described; models do not run on them in this release."""

from __future__ import annotations

from types import ModuleType

import torch

from llm.platforms.accelerator import TorchAccelerator
from llm.platforms.interface import PlatformEnum


class XpuPlatform(TorchAccelerator):
    name = "xpu"
    kind = PlatformEnum.XPU
    device_type = "xpu"
    dispatch_key = "xpu"
    build_name = "XPU"

    @classmethod
    def torch_module(cls) -> ModuleType:
        return torch.xpu

    @classmethod
    def is_built(cls) -> bool:
        return getattr(torch.version, "xpu", None) is not None
