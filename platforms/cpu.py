"""The CPU: memory and processors within the container's and the process's limits, dtypes."""

from __future__ import annotations

import functools
import logging
import math
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from llm.base import system
from llm.platforms.interface import Platform, PlatformEnum
from llm.platforms.limits import cpu_quota, host_memory


class CpuPlatform(Platform):
    """Computes in float32, whatever dtype the weights have.

    Args:
        root: the parent of /proc and /sys; another folder in tests.
    """

    name = "cpu"
    kind = PlatformEnum.CPU
    device_type = "cpu"
    dispatch_key = "cpu"
    is_forked = False  # True in a process forked from one that had computed

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root

    @classmethod
    def detect(cls) -> tuple[bool, str]:
        return True, "a CPU is always there"

    def get_device_name(self, device_id: int = 0) -> str:
        for line in _lines(self.root / "proc/cpuinfo"):
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
        return platform.machine() or "cpu"

    def memory_total(self) -> int:
        return host_memory(self.root)[0]

    def memory_free(self) -> int:
        return host_memory(self.root)[1]

    def num_threads(self) -> int:
        """Number of threads to use: the processors this process may run on, or its CPU quota if that is less."""
        allowed = len(system.cores())
        return allowed if self._quota is None else min(allowed, self._quota)

    @functools.cached_property
    def _quota(self) -> int | None:
        """The CPU quota in whole processors; read once, because every step asks."""
        quota = cpu_quota(self.root)
        return None if quota is None else max(1, math.ceil(quota))

    def import_kernels(self) -> None:
        _survive_forks()

    @contextmanager
    def inference_mode(self) -> Iterator[None]:
        """Limit threads to the CPU quota: with more, Linux would throttle all of them until the next period."""
        if self.is_forked:
            _tell_of_fork()
        threads = torch.get_num_threads()
        most = 1 if self.is_forked else self._quota
        has_too_many = most is not None and threads > most
        if has_too_many:
            torch.set_num_threads(most)  # type: ignore[arg-type]
        try:
            with torch.inference_mode():
                yield
        finally:
            if has_too_many:
                torch.set_num_threads(threads)

    def get_backend_cls(self) -> str:
        # A plugin's platform that derives from this one describes another device, which may have other memory.
        if self.kind is not PlatformEnum.CPU:
            return super().get_backend_cls()
        return "llm.kernels.cpu.backend.CpuBackend"

    def get_communicator_cls(self) -> str:
        if self.kind is not PlatformEnum.CPU:
            return super().get_communicator_cls()
        return "llm.layers.communicators.SharedMemoryCommunicator"

    def supported_dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.float32,)

    def release_memory(self) -> None:
        """Return freed heap pages to the system: glibc keeps them until `malloc_trim`, which only glibc has."""
        trim = system.c_function("malloc_trim")
        if trim is not None:
            trim(0)


@functools.cache  # a hook cannot be unregistered
def _survive_forks() -> None:
    system.after_fork(_after_fork)


def _after_fork() -> None:
    """A fork does not copy OpenMP's threads: using them again would deadlock. PyTorch's DataLoader workers compute with
    one thread for the same reason."""
    CpuPlatform.is_forked = True
    torch.set_num_threads(1)


@functools.cache
def _tell_of_fork() -> None:
    logging.getLogger("llm").warning(
        "this process was forked from one that had computed, so it computes with one thread; start it with "
        "multiprocessing's 'spawn' and build the LLM in it to use more."
    )


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
