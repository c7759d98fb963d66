"""The CPU as a platform: what a container leaves of the machine's memory. The files are fakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from llm.errors import ValidationError
from llm.platforms import PlatformEnum, cpu, select_platform
from llm.platforms.cpu import CpuPlatform

GIB = 1 << 30
MEMINFO = {"MemTotal": 64 * GIB, "MemAvailable": 48 * GIB}
NO_LIMIT_V1 = 9223372036854771712


def write(root: Path, files: dict[str, object]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")


def version_2(limit: object, usage: int = 0, cache: int = 0) -> dict[str, object]:
    stat = f"anon 5\nfile {cache}\ninactive_file {cache}"
    return {"memory.max": limit, "memory.current": usage, "memory.stat": stat}


def version_1(limit: int, usage: int = 0, cache: int = 0) -> dict[str, object]:
    stat = f"cache {cache}\ninactive_file 7\ntotal_inactive_file {cache}"
    return {
        "memory/memory.limit_in_bytes": limit,
        "memory/memory.usage_in_bytes": usage,
        "memory/memory.stat": stat,
    }


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cpu, "_CGROUP", tmp_path)
    monkeypatch.setattr(cpu, "_meminfo", lambda: MEMINFO)
    return tmp_path


@pytest.mark.parametrize(
    "files, total, free",
    [
        ({}, 64, 48),
        (version_2("max", 10 * GIB), 64, 48),
        (version_2(16 * GIB, 10 * GIB), 16, 6),
        (version_2(16 * GIB, 10 * GIB, cache=4 * GIB), 16, 10),  # cache that is dropped on demand is free
        (version_2(16 * GIB, 17 * GIB), 16, 0),
        (version_2(100 * GIB, 10 * GIB), 64, 48),  # a limit beyond the machine
        (version_2(60 * GIB, 2 * GIB), 60, 48),  # others have used up what the limit would allow
        (version_1(NO_LIMIT_V1, 10 * GIB), 64, 48),
        (version_1(16 * GIB, 10 * GIB, cache=4 * GIB), 16, 10),
        ({**version_1(8 * GIB, GIB), **version_2(16 * GIB, 10 * GIB)}, 16, 6),  # version 2 is asked first
    ],
)
def test_memory_within_a_container(root: Path, files: dict[str, object], total: int, free: int) -> None:
    write(root, files)
    assert CpuPlatform().memory_total() == total * GIB
    assert CpuPlatform().memory_free() == free * GIB


def test_meminfo() -> None:
    found = cpu._meminfo()
    assert found["MemTotal"] > found["MemAvailable"] > 1 << 20
    assert found["MemTotal"] % 1024 == 0


def test_this_machine() -> None:
    platform = CpuPlatform()
    assert 0 < platform.memory_free() <= platform.memory_total()
    assert platform.device_name()
    platform.release_memory()


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_select(device: str) -> None:
    platform, reason = select_platform(device)
    assert (platform.kind, platform.device_type) == (PlatformEnum.CPU, "cpu")
    assert reason


def test_an_unknown_device_is_named() -> None:
    with pytest.raises(ValidationError, match="device='cuda:1' is not supported"):
        select_platform("cuda:1")
