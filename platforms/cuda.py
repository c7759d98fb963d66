"""NVIDIA GPUs: detected and described; models do not run on them in this release."""

from __future__ import annotations

import torch

from llm.platforms.accelerator import TorchAccelerator
from llm.platforms.interface import PlatformEnum


class CudaPlatform(TorchAccelerator):
    name = "cuda"
    kind = PlatformEnum.CUDA
    device_type = "cuda"
    dispatch_key = "cuda"
    build_name = "CUDA"

    @classmethod
    def is_built(cls) -> bool:
        return torch.version.cuda is not None

    def get_device_capability(self, device_id: int = 0) -> tuple[int, int] | None:
        return torch.cuda.get_device_capability()

    def supported_dtypes(self) -> tuple[torch.dtype, ...]:
        """bfloat16 from capability 8.0 on."""
        if (self.get_device_capability() or (0, 0)) >= (8, 0):
            return (torch.bfloat16, torch.float16, torch.float32)
        return (torch.float16, torch.float32)
