"""Platforms: what a container leaves of the machine, instruction sets, and which platform is chosen and why.

The files under /proc and /sys are fakes, and so are the devices that this machine lacks.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded import python

import llm.platforms
from llm.config import LLMArgs
from llm.errors import LLMError, ValidationError
from llm.layers.communicators import HostCommunicator, SharedMemoryCommunicator
from llm.platforms import BUILTIN, Platform, PlatformEnum, select_platform
from llm.platforms.accelerators import (
    CudaPlatform,
    MpsPlatform,
    RocmPlatform,
    TorchAccelerator,
    TpuPlatform,
    XpuPlatform,
)
from llm.platforms.cpu import CpuPlatform
from llm.platforms.limits import cpu_quota, memory_limits
from llm.plugins import resolve_obj_by_qualname

GIB = 1 << 30
MEMINFO = f"MemTotal: {64 * GIB // 1024} kB\nMemFree: 7 kB\nMemAvailable: {48 * GIB // 1024} kB"
NO_LIMIT_V1 = 9223372036854771712


@pytest.fixture(autouse=True)
def no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is installed beside this project, and whatever the environment and `ulimit` say."""
    monkeypatch.setenv("LLM_PLUGINS", "")
    monkeypatch.delenv("LLM_PLATFORM", raising=False)
    set_limits(monkeypatch, {})


def set_limits(monkeypatch: pytest.MonkeyPatch, limits: dict[int, int]) -> None:
    """Of `setrlimit`, bytes by kind; the others are infinite."""
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits.get(kind, resource.RLIM_INFINITY),) * 2)


def fake_root(root: Path, own_groups: str, files: dict[str, object]) -> CpuPlatform:
    """A platform that sees `files` (paths under /sys/fs/cgroup) and its own groups as /proc/self/cgroup lists them."""
    contents = {"proc/meminfo": MEMINFO, "proc/self/cgroup": own_groups}
    contents |= {f"sys/fs/cgroup/{name}": content for name, content in files.items()}
    for name, content in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    return CpuPlatform(root)


def v2(group: str, limit: object, usage: int = 0, cache: int = 0) -> dict[str, object]:
    stat = f"anon 5\nfile {cache}\ninactive_file {cache}"
    return {f"{group}memory.max": limit, f"{group}memory.current": usage, f"{group}memory.stat": stat}


def v1(group: str, limit: int, usage: int = 0, cache: int = 0) -> dict[str, object]:
    stat = f"cache {cache}\ninactive_file 7\ntotal_inactive_file {cache}"
    return {
        f"memory/{group}memory.limit_in_bytes": limit,
        f"memory/{group}memory.usage_in_bytes": usage,
        f"memory/{group}memory.stat": stat,
    }


ROOT2, ROOT1 = "0::/", "4:memory:/\n1:cpu,cpuacct:/\n0::/"
DEEP2, DEEP1 = "0::/user.slice/job", "4:memory:/user.slice/job\n1:cpu,cpuacct:/user.slice/job"


@pytest.mark.parametrize(
    ("groups", "files", "total", "free"),
    [
        (ROOT2, {}, 64, 48),
        (ROOT2, v2("", "max", 10 * GIB), 64, 48),
        (ROOT2, v2("", 16 * GIB, 10 * GIB), 16, 6),
        (ROOT2, v2("", 16 * GIB, 10 * GIB, cache=4 * GIB), 16, 10),  # cache that is dropped on demand is free
        (ROOT2, v2("", 16 * GIB, 17 * GIB), 16, 0),
        (ROOT2, v2("", 100 * GIB, 10 * GIB), 64, 48),  # a limit beyond the machine
        (ROOT2, v2("", 60 * GIB, 2 * GIB), 60, 48),  # others have used up what the limit would allow
        (ROOT2, {"memory.max": 16 * GIB, "memory.current": GIB}, 16, 15),  # no memory.stat
        (ROOT2, {"memory.max": 16 * GIB}, 16, 16),  # nor memory.current
        (DEEP2, v2("user.slice/job/", 16 * GIB, 10 * GIB), 16, 6),
        (DEEP2, v2("user.slice/", 16 * GIB, 10 * GIB), 16, 6),  # a limit on the level above counts
        (DEEP2, v2("user.slice/job/", 16 * GIB, 1 * GIB) | v2("user.slice/", 20 * GIB, 18 * GIB), 16, 2),
        (DEEP2, v2("user.slice/job/", "max", 1 * GIB) | v2("", 8 * GIB, 1 * GIB), 8, 7),
        (DEEP2, v2("user.slice/job/", 40 * GIB) | v2("user.slice/", 20 * GIB) | v2("", 30 * GIB), 20, 20),
        (DEEP2, v2("user.slice/other/", 1 * GIB), 64, 48),  # of another group
        ("0::/docker/0123", v2("", 16 * GIB, 10 * GIB), 16, 6),  # the host's path, the container's mount
        ("0::/../../above", v2("", 16 * GIB, 10 * GIB), 16, 6),
        (ROOT1, v1("", NO_LIMIT_V1, 10 * GIB), 64, 48),
        (ROOT1, v1("", 16 * GIB, 10 * GIB, cache=4 * GIB), 16, 10),
        (ROOT1, {"memory/memory.limit_in_bytes": 16 * GIB}, 16, 16),
        (DEEP1, v1("user.slice/job/", 16 * GIB, 10 * GIB), 16, 6),
        (DEEP1, v1("user.slice/job/", 32 * GIB) | v1("", 16 * GIB, 10 * GIB), 16, 6),
        ("4:memory:/docker/0123", v1("", 16 * GIB, 10 * GIB), 16, 6),
        (ROOT1, {**v1("", 8 * GIB, GIB), **v2("unified/", 16 * GIB, 10 * GIB)}, 8, 6),  # both: the smallest counts
        ("", v2("", 16 * GIB, 10 * GIB), 16, 6),  # /proc says nothing: the root is asked all the same
    ],
)
def test_memory_within_a_container(
    tmp_path: Path, groups: str, files: dict[str, object], total: int, free: int
) -> None:
    platform = fake_root(tmp_path, groups, files)
    assert platform.memory_total() == total * GIB
    assert platform.memory_free() == free * GIB
    assert platform.memory_used() == (total - free) * GIB


def test_no_cgroup_files_at_all(tmp_path: Path) -> None:
    platform = fake_root(tmp_path, ROOT2, {})
    (tmp_path / "proc/self/cgroup").unlink()
    assert memory_limits(tmp_path) == []
    assert cpu_quota(tmp_path) is None
    assert platform.memory_total() == 64 * GIB


def test_the_limits_of_the_process_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    platform = fake_root(tmp_path, ROOT2, {})
    kib = GIB // 1024
    (tmp_path / "proc/self/status").write_text(f"Name:\tx\nVmSize:\t{3 * kib} kB\nVmData:\t{kib} kB\n")
    set_limits(monkeypatch, {resource.RLIMIT_AS: 12 * GIB})
    assert (platform.memory_total(), platform.memory_free()) == (12 * GIB, 9 * GIB)
    set_limits(monkeypatch, {resource.RLIMIT_AS: 12 * GIB, resource.RLIMIT_DATA: 5 * GIB})
    assert (platform.memory_total(), platform.memory_free()) == (5 * GIB, 4 * GIB)
    set_limits(monkeypatch, {resource.RLIMIT_AS: 2 * GIB})
    assert platform.memory_free() == 0


def test_a_model_fits_into_what_ulimit_leaves() -> None:
    """Half of what the machine has free would be more than the process may have."""
    code = """
import resource, torch, llm
resource.setrlimit(resource.RLIMIT_DATA, (3 << 30, 3 << 30))
with llm.LLM(verbose=False, max_num_seqs=4096) as model:
    print(len(model.generate(["In the"], use_tqdm=False)), model.config.cache_config.kv_cache_memory_bytes < 3 << 29)
"""
    done = python("-c", code)
    assert done.stdout == "1 True\n", done.stderr


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        (ROOT2, {}, None),
        (ROOT2, {"cpu.max": "max 100000"}, None),
        (ROOT2, {"cpu.max": "150000 100000"}, 1.5),
        (DEEP2, {"user.slice/job/cpu.max": "max 100000", "user.slice/cpu.max": "50000 100000"}, 0.5),
        (DEEP2, {"user.slice/job/cpu.max": "200000 100000", "cpu.max": "300000 100000"}, 2.0),
        (ROOT1, {"cpu,cpuacct/cpu.cfs_quota_us": -1, "cpu,cpuacct/cpu.cfs_period_us": 100000}, None),
        (ROOT1, {"cpu,cpuacct/cpu.cfs_quota_us": 250000, "cpu,cpuacct/cpu.cfs_period_us": 100000}, 2.5),
        (ROOT1, {"cpu/cpu.cfs_quota_us": 250000, "cpu/cpu.cfs_period_us": 100000}, 2.5),
        (DEEP1, {"cpu/user.slice/cpu.cfs_quota_us": 100000, "cpu/user.slice/cpu.cfs_period_us": 50000}, 2.0),
    ],
)
def test_threads_within_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str, files: dict[str, object], quota: float | None
) -> None:
    platform = fake_root(tmp_path, groups, files)
    assert cpu_quota(tmp_path) == quota
    monkeypatch.setattr(os, "cpu_count", lambda: 1000)
    for allowed in (1, 2, 16):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, allowed=allowed: set(range(allowed)))
        expected = allowed if quota is None else min(allowed, {0.5: 1, 1.5: 2, 2.0: 2, 2.5: 3}[quota])
        assert platform.num_threads() == expected


@pytest.mark.parametrize(("quota", "during"), [("max 100000", 3), ("150000 100000", 2), ("900000 100000", 3)])
def test_a_step_uses_no_more_threads_than_the_quota_pays_for(tmp_path: Path, quota: str, during: int) -> None:
    platform = fake_root(tmp_path, ROOT2, {"cpu.max": quota})
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.raises(ZeroDivisionError), platform.inference_mode():
            assert torch.get_num_threads() == during
            raise ZeroDivisionError
        assert torch.get_num_threads() == 3
        assert not torch.is_inference_mode_enabled()
    finally:
        torch.set_num_threads(before)


def test_this_machine() -> None:
    platform = CpuPlatform()
    assert 0 < platform.memory_free() <= platform.memory_total()
    assert 1 <= platform.num_threads() <= len(os.sched_getaffinity(0))
    assert platform.get_device_name()
    platform.release_memory()
    platform.synchronize()
    platform.set_device(0)
    assert platform.is_pin_memory_available() is False
    with platform.inference_mode():
        assert torch.is_inference_mode_enabled()
    with pytest.raises(ValidationError, match="cpu has one device"):
        platform.set_device(1)
    assert resolve_obj_by_qualname(platform.get_communicator_cls()) is SharedMemoryCommunicator
    # Of devices between which nothing is known to go.
    assert resolve_obj_by_qualname(Platform.get_communicator_cls(platform)) is HostCommunicator


def test_a_name_without_a_processor_name(tmp_path: Path) -> None:
    assert fake_root(tmp_path, ROOT2, {}).get_device_name()


# --- The choice. ---


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_the_cpu_is_chosen(device: str) -> None:
    platform, reason = select_platform(device)
    assert (platform.kind, platform.device_type, platform.name) == (PlatformEnum.CPU, "cpu", "cpu")
    assert reason == {"cpu": "asked for"}.get(device, reason)
    assert llm.platforms.current_platform is platform is select_platform("cpu")[0]


@pytest.mark.parametrize("device", ["cpuu", "gpu:1", "cuda:", "cuda:one", "", 3])
def test_an_unknown_device_is_refused(device: Any) -> None:
    with pytest.raises(ValidationError, match=r"is not known.*Known: auto, cuda, rocm, xpu, mps, tpu, cpu") as error:
        select_platform(device)
    assert (error.value.parameter, error.value.value) == ("device", device)


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ValidationError, match="device='cuda' cannot be used: this PyTorch is built without CUDA"):
        select_platform("cuda")


def test_the_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeCuda, "why_not", lambda self: None)
    monkeypatch.setattr(llm.platforms, "BUILTIN", (FakeCuda, CpuPlatform))
    assert select_platform()[0].kind is PlatformEnum.CUDA
    monkeypatch.setenv("LLM_PLATFORM", "CPU")
    platform, reason = select_platform()
    assert (platform.kind, reason) == (PlatformEnum.CPU, "LLM_PLATFORM=CPU")
    assert select_platform("cuda")[0].kind is PlatformEnum.CUDA  # an argument is nearer than the environment
    monkeypatch.setenv("LLM_PLATFORM", "gpu")
    with pytest.raises(ValidationError, match="LLM_PLATFORM='gpu' is not known") as error:
        select_platform()
    assert error.value.parameter == "LLM_PLATFORM"


class FakeModule:
    """As much of torch.cuda as a platform asks."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def get_device_name(index: int = 0) -> str:
        return "Fake 9000"

    @staticmethod
    def mem_get_info(index: int) -> tuple[int, int]:
        return 3 * GIB, (8 + index) * GIB

    @staticmethod
    def device_count() -> int:
        return 2

    @staticmethod
    def set_device(index: int) -> None:
        FakeModule.current = index

    current = -1


class FakeCuda(CudaPlatform):
    @classmethod
    def torch_module(cls) -> Any:
        return FakeModule

    @classmethod
    def is_built(cls) -> bool:
        return True


def test_an_accelerator_that_can_be_used_is_chosen_and_one_that_cannot_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.platforms, "BUILTIN", (FakeCuda, CpuPlatform))
    platform, reason = select_platform()
    assert platform.kind is PlatformEnum.CUDA and reason == "Fake 9000 is there"
    assert (platform.get_device_name(), platform.memory_total(), platform.memory_used()) == (
        "Fake 9000",
        8 * GIB,
        5 * GIB,
    )
    monkeypatch.setattr(FakeCuda, "why_not", lambda self: "too old")
    platform, reason = select_platform()
    assert platform.kind is PlatformEnum.CPU
    assert reason == "cuda is there (Fake 9000): too old; a CPU is always there"
    with pytest.raises(ValidationError, match="device='cuda:1' cannot be used: too old; 'cpu' always can"):
        select_platform("cuda:1")


def test_one_of_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.platforms, "BUILTIN", (FakeCuda, CpuPlatform))
    first, second = (select_platform(name)[0] for name in ("cuda:0", "cuda:1"))
    assert first is select_platform("cuda")[0] is not second is select_platform("cuda:1")[0]
    assert (str(first.device), str(second.device)) == ("cuda:0", "cuda:1")
    assert (first.memory_total(), second.memory_total()) == (8 * GIB, 9 * GIB)
    second.set_device(1)
    assert FakeModule.current == 1
    with pytest.raises(ValidationError, match="device='cuda:2' cannot be used: devices 0 to 1 can be seen here"):
        second.set_device(2)
    # PyTorch for AMD calls its devices cuda.
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(llm.platforms, "BUILTIN", (RocmPlatform, CpuPlatform))
    with pytest.raises(ValidationError, match="device='cuda' cannot be used: no ROCm device is visible"):
        select_platform("cuda")


def test_when_nothing_is_found_everything_that_was_tried_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoCpu(CpuPlatform):
        @classmethod
        def detect(cls) -> tuple[bool, str]:
            return False, "the dog ate it"

    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(FakeCuda, "why_not", lambda self: "too old")
    monkeypatch.setattr(llm.platforms, "BUILTIN", (CudaPlatform, FakeCuda, NoCpu))
    with pytest.raises(LLMError, match=r"cuda: too old; cpu: the dog ate it; no platform plugin is active"):
        select_platform()


@pytest.mark.parametrize("cls", BUILTIN)
def test_every_platform_describes_itself(cls: type[Platform]) -> None:
    is_there, seen = cls.detect()
    assert seen
    platform = cls()
    assert platform.name and platform.device_type
    assert (platform.kind is PlatformEnum.UNSPECIFIED) is (cls is MpsPlatform)  # vLLM has no name for it
    assert platform.dispatch_key in {"cpu", "cuda", "hip", "xpu", "native", "tpu"}
    assert platform.check_and_update_config(args := LLMArgs("x")) is args
    assert platform.update_kv_cache_specs([]) == []
    assert platform.get_attn_backend_cls(64).startswith("llm.")
    platform.verify_quantization("anything")
    platform.supported_quantization = ("int8",)
    with pytest.raises(ValidationError, match=f"quantization='fp8' is not computed on {platform.name}; known: int8"):
        platform.verify_quantization("fp8")
    if cls is CpuPlatform or is_there:
        assert all(isinstance(dtype, torch.dtype) for dtype in platform.supported_dtypes())


@pytest.mark.parametrize(
    ("cls", "attribute", "seen"),
    [
        (CudaPlatform, "cuda", "without CUDA"),
        (RocmPlatform, "hip", "without ROCm"),
        (XpuPlatform, "xpu", "without XPU"),
    ],
)
def test_detectors_say_what_they_saw(
    monkeypatch: pytest.MonkeyPatch, cls: type[TorchAccelerator], attribute: str, seen: str
) -> None:
    monkeypatch.setattr(torch.version, attribute, None, raising=False)
    assert cls.detect() == (False, f"this PyTorch is built {seen}")
    monkeypatch.setattr(torch.version, attribute, "1.0", raising=False)
    monkeypatch.setattr(cls.torch_module(), "is_available", lambda: False)
    assert cls.detect() == (False, f"no {cls.build_name} device is visible")
    monkeypatch.setattr(cls, "torch_module", classmethod(lambda cls: FakeModule))
    assert cls.detect() == (True, "Fake 9000")


def test_apples_gpu_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for built, available, seen in (
        (False, False, "this PyTorch is built without MPS"),
        (True, False, "no MPS device is visible"),
        (True, True, "Apple GPU"),
    ):
        monkeypatch.setattr(torch.backends.mps, "is_built", lambda built=built: built)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda available=available: available)
        assert MpsPlatform.detect() == (available, seen)


def test_a_tpu_is_found_without_importing_torch_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm.platforms.accelerators.find_spec", lambda name: None)
    assert TpuPlatform.detect() == (False, "torch_xla is not installed")
    monkeypatch.setattr("llm.platforms.accelerators.find_spec", lambda name: object())
    there = {"/dev/accel0"}
    monkeypatch.setattr(Path, "exists", lambda self: str(self) in there)
    assert TpuPlatform.detect() == (True, "TPU")
    there.clear()
    assert TpuPlatform.detect() == (False, "no TPU device is visible")
    assert "torch_xla" not in sys.modules


def test_what_does_not_exist_is_an_attribute_error() -> None:
    for thing in (CpuPlatform(), llm.platforms, select_platform()[0]):
        with pytest.raises(AttributeError, match="no_such_thing"):
            thing.no_such_thing  # noqa: B018
    with pytest.raises(NotImplementedError):
        Platform().memory_total()


def test_current_platform_is_resolved_when_looked_at() -> None:
    code = (
        "import llm.platforms as p, os\n"
        "assert 'current_platform' not in vars(p)\n"
        "os.environ['LLM_PLATFORM'] = 'cpu'\n"
        "from llm.platforms import current_platform\n"
        "print(current_platform.device_type, current_platform is p.current_platform)"
    )
    result = python("-c", code)
    assert result.stdout == "cpu True\n", result.stderr
