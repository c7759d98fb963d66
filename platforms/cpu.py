"""The CPU as a platform: memory within the container's limits, and the types it computes in."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from llm.platforms.interface import Platform, PlatformEnum

_CGROUP = Path("/sys/fs/cgroup")
# cgroup version 2, then 1: (limit, usage, the statistics file and its name for page cache that can be dropped).
_CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


class CpuPlatform(Platform):
    kind = PlatformEnum.CPU
    device_type = "cpu"
    dispatch_key = "cpu"

    def device_name(self) -> str:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
        return "cpu"

    def memory_total(self) -> int:
        limit = _cgroup_memory(_CGROUP)
        total = _meminfo()["MemTotal"]
        return min(total, limit[0]) if limit else total

    def memory_free(self) -> int:
        limit = _cgroup_memory(_CGROUP)
        available = _meminfo()["MemAvailable"]
        return max(0, min(available, limit[0] - limit[1])) if limit else available

    def supported_dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.float32,)

    def release_memory(self) -> None:
        """glibc keeps freed heap pages; `malloc_trim` returns them. Other C libraries have no such call."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _meminfo() -> dict[str, int]:
    """/proc/meminfo in bytes."""
    pairs = (line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return {name: int(rest.split()[0]) * 1024 for name, rest in pairs}


def _cgroup_memory(root: Path) -> tuple[int, int] | None:
    """(limit, usage without droppable cache) of this process's memory cgroup in bytes, None without a limit."""
    for limit_name, usage_name, stat_name, droppable in _CGROUP_FILES:
        if not (root / limit_name).exists():
            continue
        limit = (root / limit_name).read_text().strip()
        # Version 1 writes "no limit" as a number near 2**63.
        if limit == "max" or int(limit) >= 2**60:
            return None
        stat = dict(line.split() for line in (root / stat_name).read_text().splitlines())
        return int(limit), int((root / usage_name).read_text()) - int(stat.get(droppable, 0))
    return None
