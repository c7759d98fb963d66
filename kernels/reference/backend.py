"""Plain PyTorch as a backend: every operation is its definition. Works wherever PyTorch does."""

from __future__ import annotations

import functools

import torch

from llm.kernels.backend import CPU, Backend
from llm.platforms.interface import Platform


class ReferenceBackend(Backend):
    """The backend of a platform without kernels, and of one whose kernels cannot be built."""

    name = "reference"

    @classmethod
    def of(cls, platform: Platform) -> Backend:
        if platform.device == CPU:
            return pytorch(_ASKED_FOR)
        return _on_device(platform)

    @property
    def invariant(self) -> tuple[bool, str]:
        return False, f"PyTorch's own operations compute, their rounding depends on the batch: {self.reason}"


@functools.cache
def pytorch(reason: str, device: torch.device = CPU, pins: bool = False) -> ReferenceBackend:
    """The reference backend on `device`; `reason` says why it was chosen."""
    return ReferenceBackend({}, reason, device, pins)


@functools.cache
def _on_device(platform: Platform) -> ReferenceBackend:
    """One object per platform, and so per device."""
    reason = f"there are no kernels for {platform.name}"
    return ReferenceBackend({}, reason, platform.device, platform.is_pin_memory_available(), platform.synchronize)


_ASKED_FOR = "plain PyTorch was asked for"
REFERENCE = pytorch(_ASKED_FOR)
