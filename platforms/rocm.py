"""AMD GPUs: detected and described; models do not run on them in this release. Their device type in torch is "cuda"."""

from __future__ import annotations

import torch

from llm.platforms.accelerator import TorchAccelerator
from llm.platforms.interface import PlatformEnum


class RocmPlatform(TorchAccelerator):
    name = "rocm"
    kind = PlatformEnum.ROCM
    device_type = "cuda"
    dispatch_key = "hip"
    build_name = "ROCm"

    @classmethod
    def is_built(cls) -> bool:
        return torch.version.hip is not None
