"""A platform that is written against a contract of the future."""

from __future__ import annotations


def platform() -> str:
    """Always there."""
    return "rival.platform:RivalPlatform"
