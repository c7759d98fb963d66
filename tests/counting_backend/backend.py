"""The backend and the platform that has it."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

from llm.kernels.backend import OPERATIONS, Backend, Operation
from llm.kernels.cpu.backend import CpuBackend
from llm.platforms.cpu import CpuPlatform
from llm.platforms.interface import Platform, PlatformEnum

calls: Counter[str] = Counter()


class CountingBackend(Backend):
    name = "counting"

    def __init__(self, inner: Backend) -> None:
        super().__init__({name: counted(name, inner.op(name)) for name in OPERATIONS}, inner.reason)

    @classmethod
    def of(cls, platform: Platform) -> Backend:
        return _counting(CpuBackend.of(platform))


class CountingPlatform(CpuPlatform):
    name = "counting"
    kind = PlatformEnum.OOT
    dispatch_key = "oot"

    def get_backend_cls(self) -> str:
        return "counting_backend.backend.CountingBackend"


@functools.cache
def _counting(inner: Backend) -> CountingBackend:
    return CountingBackend(inner)


def counted(name: str, operation: Operation) -> Operation:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return operation(*args, **kwargs)

    return call
