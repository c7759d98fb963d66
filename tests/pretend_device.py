"""A device that only pretends to be one: its tensors lie in the CPU's memory and behave as a GPU's.

An operation that is given such a tensor and one of the CPU's raises, as it would on a GPU; only copies go across, and
numbers (tensors without dimensions). A tensor made without naming the device is the CPU's. So what runs under
`pretend_device` on this device placed every tensor there. The device is spelled "meta", a name that every PyTorch knows
and that stands for no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from llm.platforms.cpu import CpuPlatform
from llm.platforms.interface import PlatformEnum

DEVICE = torch.device("meta")
# What was pinned: without an accelerator PyTorch cannot.
PINNED: list[torch.Tensor] = []
_aten = torch.ops.aten
_COPIES = {_aten._to_copy.default, _aten.copy_.default}


class OnDevice(torch.Tensor):
    """A tensor of the device, over `memory` of the CPU."""

    memory: torch.Tensor

    @staticmethod
    def __new__(cls, memory: torch.Tensor) -> OnDevice:
        layout = memory.stride(), memory.storage_offset(), None, memory.dtype, memory.layout, DEVICE
        made = torch.Tensor._make_wrapper_subclass(cls, memory.shape, *layout)
        made.memory = memory
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnDevice({self.memory})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatched(func, args, kwargs or {})


@contextmanager
def pretend_device() -> Iterator[None]:
    """Within, tensors can be made on the device."""
    with _Dispatched(), _Constructed():
        yield


class _Constructed(TorchFunctionMode):
    """`torch.tensor` and `tolist` read and fill memory where no dispatch mode is asked."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") == DEVICE:
            del kwargs["device"]
            return func(*args, **kwargs).to(DEVICE)
        if func is torch.Tensor.tolist and isinstance(args[0], OnDevice):
            return args[0].memory.tolist()
        if func is torch.Tensor.pin_memory:
            PINNED.append(args[0])
            return args[0]
        return func(*args, **kwargs)


class _Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatched(func, args, kwargs or {})


class PretendPlatform(CpuPlatform):
    name = "pretend"
    kind = PlatformEnum.OOT
    device_type = "meta"
    dispatch_key = "native"

    def inference_mode(self) -> Any:
        return torch.no_grad()  # tensors over another's memory have no version in inference mode


def dispatched(func: Any, args: Any, kwargs: Any) -> Any:
    tensors = [item for item in tree_flatten((args, kwargs))[0] if isinstance(item, torch.Tensor)]
    ours = [item for item in tensors if isinstance(item, OnDevice)]
    strangers = [item for item in tensors if not isinstance(item, OnDevice) and item.dim()]
    if ours and strangers and func not in _COPIES:
        raise RuntimeError(f"{func} was given tensors of {DEVICE} and of {strangers[0].device}")
    device = kwargs.get("device")
    stays = bool(ours) if device is None else device == DEVICE
    if device == DEVICE:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    inner = tree_map_only(OnDevice, lambda item: item.memory, (args, kwargs))
    result = func(*inner[0], **inner[1])
    if func._schema.is_mutable:  # what was written is what is returned
        return args[0] if "out" not in kwargs else kwargs["out"]
    return tree_map_only(torch.Tensor, OnDevice, result) if stays else result
