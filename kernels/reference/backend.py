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
        return pytorch(_ASKED_FOR, platform.device, platform.is_pin_memory_available())

    @property
    def invariant(self) -> tuple[bool, str]:
        return False, f"PyTorch's own operations compute, their rounding depends on the batch: {self.reason}"


@functools.cache
def pytorch(reason: str, device: torch.device = CPU, pins: bool = False) -> ReferenceBackend:
    """The reference backend on `device`; `reason` says why it was chosen."""
    return ReferenceBackend({}, reason, device, pins)


_ASKED_FOR = "plain PyTorch was asked for"
REFERENCE = pytorch(_ASKED_FOR)
