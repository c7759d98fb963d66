"""The platform itself; it asks for more than this release offers."""

from __future__ import annotations

from llm.platforms.cpu import CpuPlatform
from llm.platforms.interface import PlatformEnum


class RivalPlatform(CpuPlatform):
    kind = PlatformEnum.OOT
    dispatch_key = "oot"
    contract_version = 99
