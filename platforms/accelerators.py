"""Accelerators that PyTorch computes on: NVIDIA's and AMD's GPUs, Intel's, Apple's; and Google's TPUs, which are found
and described.

Their operations are PyTorch's own unless `get_backend_cls` names kernels: Triton's, of NVIDIA's and AMD's GPUs. The
modules of torch that stand for them (`torch.cuda` ...) are part of every build, so no optional package is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import torch

from llm.errors import ValidationError
from llm.platforms.interface import Platform, PlatformEnum


class TorchAccelerator(Platform):
    """A device behind `torch.cuda` or a module like it.

    Attributes:
        build_name: the name of the torch build that supports the device.
    """

    build_name: ClassVar[str] = ""
    batched_tokens = 8192  # as vLLM's

    @classmethod
    def torch_module(cls) -> ModuleType:
        """`torch.cuda` or a module like it."""
        return torch.cuda

    @classmethod
    def is_built(cls) -> bool:
        """True if this build of torch supports the device."""
        raise NotImplementedError

    @classmethod
    def detect(cls) -> tuple[bool, str]:
        if not cls.is_built():
            return False, f"this PyTorch is built without {cls.build_name}"
        if not cls.torch_module().is_available():
            return False, f"no {cls.build_name} device is visible"
        return True, cls.torch_module().get_device_name(0)

    @property
    def device(self) -> torch.device:
        return torch.device(self.device_type, self.index)

    def get_device_name(self, device_id: int | None = None) -> str:
        name: str = self.torch_module().get_device_name(self.index if device_id is None else device_id)
        return name

    def memory_total(self) -> int:
        return int(self.torch_module().mem_get_info(self.index)[1])

    def memory_free(self) -> int:
        return int(self.torch_module().mem_get_info(self.index)[0])

    def memory_of(self, call: Callable[[], object]) -> int | None:
        module = self.torch_module()
        self.synchronize()
        module.reset_peak_memory_stats(self.index)
        before = int(module.memory_allocated(self.index))
        call()
        self.synchronize()
        return int(module.max_memory_allocated(self.index)) - before

    def release_memory(self) -> None:
        self.torch_module().empty_cache()

    def set_device(self, index: int) -> None:
        count = self.torch_module().device_count()
        if not 0 <= index < count:
            there = "device 0 alone" if count == 1 else f"devices 0 to {count - 1}"
            raise ValidationError(
                f"device='{self.name}:{index}' cannot be used: {there} can be seen here.",
                parameter="device",
                value=index,
            )
        self.torch_module().set_device(index)

    @contextmanager
    def inference_mode(self) -> Iterator[None]:
        """What is launched goes to this platform's device: the current one is a thread's own."""
        with self.torch_module().device(self.index), torch.inference_mode():
            yield

    def synchronize(self) -> None:
        self.torch_module().synchronize(self.index)

    def manual_seed_all(self, seed: int) -> None:
        self.torch_module().manual_seed_all(seed)

    def is_pin_memory_available(self) -> bool:
        return True

    def supported_dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.bfloat16, torch.float16, torch.float32)


_TRITON = "llm.kernels.triton.backend.TritonBackend"


class NcclAccelerator(TorchAccelerator):
    """One whose devices NCCL connects, or AMD's library of that name, where PyTorch has it."""

    def get_communicator_cls(self) -> str:
        if torch.distributed.is_available() and torch.distributed.is_nccl_available():
            return "llm.layers.communicators.NcclCommunicator"
        return super().get_communicator_cls()


class CudaPlatform(NcclAccelerator):
    """NVIDIA's GPUs, with the Triton kernels where Triton is installed."""

    name = "cuda"
    kind = PlatformEnum.CUDA
    device_type = "cuda"
    dispatch_key = "cuda"
    build_name = "CUDA"

    @classmethod
    def is_built(cls) -> bool:
        return torch.version.cuda is not None

    def get_backend_cls(self) -> str:
        return _TRITON

    def get_device_capability(self, device_id: int | None = None) -> tuple[int, int] | None:
        found: tuple[int, int] = self.torch_module().get_device_capability(
            self.index if device_id is None else device_id
        )
        return found

    def supported_dtypes(self) -> tuple[torch.dtype, ...]:
        """bfloat16 from capability 8.0 on."""
        if (self.get_device_capability() or (0, 0)) >= (8, 0):
            return (torch.bfloat16, torch.float16, torch.float32)
        return (torch.float16, torch.float32)


class RocmPlatform(NcclAccelerator):
    """AMD's GPUs. Their device type in torch is "cuda", so `device="cuda"` is one of these where torch is built for
    them."""

    name = "rocm"
    kind = PlatformEnum.ROCM
    device_type = "cuda"
    dispatch_key = "hip"
    build_name = "ROCm"

    @classmethod
    def is_built(cls) -> bool:
        return torch.version.hip is not None

    def get_backend_cls(self) -> str:
        return _TRITON


class XpuPlatform(TorchAccelerator):
    """Intel's GPUs."""

    name = "xpu"
    kind = PlatformEnum.XPU
    device_type = "xpu"
    dispatch_key = "xpu"
    build_name = "XPU"

    @classmethod
    def torch_module(cls) -> ModuleType:
        return torch.xpu

    @classmethod
    def is_built(cls) -> bool:
        return getattr(torch.version, "xpu", None) is not None


class MpsPlatform(TorchAccelerator):
    """Apple's GPUs: one, whose memory is the host's."""

    name = "mps"
    kind = PlatformEnum.UNSPECIFIED
    device_type = "mps"
    build_name = "MPS"

    @classmethod
    def torch_module(cls) -> ModuleType:
        return torch.mps

    @classmethod
    def is_built(cls) -> bool:
        return torch.backends.mps.is_built()

    @classmethod
    def detect(cls) -> tuple[bool, str]:
        if not cls.is_built():
            return False, f"this PyTorch is built without {cls.build_name}"
        if not torch.backends.mps.is_available():
            return False, "no MPS device is visible"
        return True, "Apple GPU"

    def get_device_name(self, device_id: int | None = None) -> str:
        return "Apple GPU"

    def memory_total(self) -> int:
        return int(torch.mps.recommended_max_memory())

    def memory_free(self) -> int:
        return max(0, self.memory_total() - int(torch.mps.driver_allocated_memory()))

    def memory_of(self, call: Callable[[], object]) -> int | None:
        return None  # torch.mps keeps no peak

    def set_device(self, index: int) -> None:
        if index:
            raise ValidationError(
                f"device='mps:{index}' cannot be used: there is one, 'mps'.", parameter="device", value=index
            )

    @contextmanager
    def inference_mode(self) -> Iterator[None]:
        with torch.inference_mode():
            yield

    def synchronize(self) -> None:
        torch.mps.synchronize()

    def manual_seed_all(self, seed: int) -> None:
        torch.mps.manual_seed(seed)

    def is_pin_memory_available(self) -> bool:
        return False

    def supported_dtypes(self) -> tuple[torch.dtype, ...]:
        """bfloat16 from macOS 14 on."""
        wide = (torch.float16, torch.float32)
        return (torch.bfloat16, *wide) if torch.backends.mps.is_macos_or_newer(14, 0) else wide


class TpuPlatform(Platform):
    """Google's TPUs: models do not run on them.

    Detection looks for the driver's device files and for an installed torch_xla. It does not import torch_xla, which
    would acquire the device.
    """

    name = "tpu"
    kind = PlatformEnum.TPU
    device_type = "xla"
    dispatch_key = "tpu"
    simple_compile_backend = "openxla"

    @classmethod
    def detect(cls) -> tuple[bool, str]:
        if find_spec("torch_xla") is None:
            return False, "torch_xla is not installed"
        if not Path("/dev/accel0").exists() and not Path("/dev/vfio/0").exists():
            return False, "no TPU device is visible"
        return True, "TPU"

    def why_not(self) -> str | None:
        return "models do not run on TPUs"

    def get_device_name(self, device_id: int = 0) -> str:
        return "TPU"

    def supported_dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.bfloat16, torch.float32)
