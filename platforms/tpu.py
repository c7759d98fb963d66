"""Google's TPUs: detected and described; models do not run on them in this release.

Detection looks for the driver's device files and for an installed torch_xla. It does not import torch_xla, which would
acquire the device.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch

from llm.platforms.accelerator import LATER
from llm.platforms.interface import Platform, PlatformEnum


class TpuPlatform(Platform):
    name = "tpu"
    kind = PlatformEnum.TPU
    device_type = "xla"
    dispatch_key = "tpu"
    simple_compile_backend = "openxla"

    @classmethod
    def detect(cls) -> tuple[bool, str]:
        if find_spec("torch_xla") is None:
            return False, "torch_xla is not installed"
        if not Path("/dev/accel0").exists() and not Path("/dev/vfio/0").exists():
            return False, "no TPU device is visible"
        return True, "TPU"

    def why_not(self) -> str | None:
        return LATER

    def get_device_name(self, device_id: int = 0) -> str:
        return "TPU"

    def supported_dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.bfloat16, torch.float32)
