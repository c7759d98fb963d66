"""Which platform this process computes on.

Owns the choice and its reason. A platform describes a device; it holds no model state.
"""

from __future__ import annotations

from llm.errors import ValidationError
from llm.platforms.cpu import CpuPlatform
from llm.platforms.interface import Platform, PlatformEnum

__all__ = ["Platform", "PlatformEnum", "select_platform"]


def select_platform(device: str = "auto") -> tuple[Platform, str]:
    """Return the platform for `device` ("auto" or "cpu") and why it was chosen; else raise `ValidationError`."""
    if device == "auto":
        return CpuPlatform(), "the CPU is the only platform of this release"
    if device == "cpu":
        return CpuPlatform(), "asked for"
    raise ValidationError(
        f"device={device!r} is not supported; this release computes on the CPU: use 'cpu' or 'auto'.",
        parameter="device",
        value=device,
    )
