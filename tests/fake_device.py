"""A CUDA device that computes nothing: whole steps on PyTorch's fake tensors, which know types, shapes and devices.

An operation that is given tensors of two devices, or of types that do not go together, raises, as it would on a GPU.
What the host reads of the device is zeros.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from llm.kernels.backend import Backend
from llm.kernels.reference import experts
from llm.platforms.cpu import CpuPlatform
from llm.platforms.interface import PlatformEnum
from llm.sampling import sampler

_CUDA, _META = 1, 14  # of c10::DeviceType
_READ = {torch.float32: np.float32, torch.int64: np.int64}


class FakePlatform(CpuPlatform):
    name = "fake"
    kind = PlatformEnum.OOT
    device_type = "cuda"
    dispatch_key = "native"

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)

    def supported_dtypes(self) -> tuple[torch.dtype, ...]:
        return torch.bfloat16, torch.float16, torch.float32


def are_fakes_complete() -> bool:
    """PyTorch 2.11's fake tensors fail where an empty dimension is split; they do not see operands of two types."""
    with FakeTensorMode():
        try:
            torch.empty(1, 0).split(1, -1)
        except IndexError:
            return False
    return True


@contextmanager
def fake_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within, every tensor is a fake one, and those of the device are CUDA's."""
    start = sampler._DeviceStep.start

    def start_download(self: Backend, *tensors: torch.Tensor) -> Callable[[], list[np.ndarray]]:
        assert all(tensor.device == self.device for tensor in tensors)
        return lambda: [np.zeros(tuple(tensor.shape), dtype=_READ[tensor.dtype]) for tensor in tensors]

    def started(self: Any, logits: torch.Tensor) -> sampler.Pending:
        pending = start(self, logits)

        def finish(arrays: Any) -> Any:
            with unset_fake_temporarily():
                return replace(pending.finish(arrays), tokens=arrays[0])

        return sampler.Pending(pending.tensors, finish)

    def ends(chosen: torch.Tensor, count: int) -> list[int]:
        return [len(chosen) * expert // count for expert in range(count + 1)]

    monkeypatch.setattr(Backend, "start_download", start_download)
    monkeypatch.setattr(Backend, "synchronize", lambda self: None)
    monkeypatch.setattr(sampler._DeviceStep, "start", started)
    monkeypatch.setattr(experts, "expert_ends", ends)
    with _guarded(), FakeTensorMode(allow_non_fake_inputs=True), _Numbers():
        yield


class _Numbers(TorchDispatchMode):
    """What is asked of a tensor's values while weights are made: that all are finite, their least and their largest."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return args[0].dtype == torch.bool or 0
        return func(*args, **(kwargs or {}))


@contextmanager
def _guarded() -> Iterator[None]:
    """A build without CUDA lacks what makes a CUDA device the current one, which PyTorch asks for even for fake
    tensors: that of the meta device, which does nothing, takes its place."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 32).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before = guards[_CUDA]
    guards[_CUDA] = before or guards[_META]
    try:
        yield
    finally:
        guards[_CUDA] = before
