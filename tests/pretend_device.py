"""A device that only pretends to be one: its tensors lie in the CPU's memory and behave as a GPU's.

An operation that is given such a tensor and one of the CPU's raises, as it would on a GPU; only copies go across, and
numbers (tensors without dimensions). A tensor made without naming the device is the CPU's.

It is asynchronous. Operations are put into a queue and computed when somebody waits for the device (`QUEUE.wait`), so
that memory of the host that a copy from pinned memory reads, and memory that a copy to the host writes, must not be
touched before: what breaks this rule computes with the wrong numbers. Waits are counted, and so are copies from memory
that is not pinned, which take their values at once and for which a GPU's driver would hold up the host.

Products and functions like exp are computed in float64 and rounded: their bits do not depend on how PyTorch cuts
matrices of some size, or on an element's place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from llm.platforms.cpu import CpuPlatform
from llm.platforms.interface import PlatformEnum

_MODULE = SimpleNamespace(
    _lazy_init=lambda: None,
    is_initialized=lambda: True,
    is_available=lambda: False,  # fake tensors would make one of it
    device_count=lambda: 1,
    current_device=lambda: 0,
    _is_in_bad_fork=lambda: False,
    manual_seed_all=lambda seed: None,
)
_setup_privateuseone_for_python_backend("pretend", _MODULE)
DEVICE = torch.device("pretend", 0)
_CPU = torch.device("cpu")
_aten = torch.ops.aten
_MOST_WAITING = 400
_COPIES = {_aten._to_copy.default, _aten.copy_.default}
_IN_FLOAT64 = {
    *(_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default),
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    *(_aten.silu.default, _aten.gelu.default, _aten.sigmoid.default, _aten.tanh.default, _aten.exp.default),
}


class Queue:
    """What the device has yet to compute.

    Attributes:
        waits: how often the host waited for it.
        pageable: copies to the device from memory that is not pinned.
        pinned: copies to the device from pinned memory.
    """

    def __init__(self) -> None:
        self._calls: list[Callable[[], object]] = []
        self._asked = 0
        self.waits = self.pageable = self.pinned = 0

    def put(self, call: Callable[[], object]) -> None:
        self._asked += 1
        self._calls.append(call)
        if len(self._calls) > _MOST_WAITING:  # it computes while the host goes on
            self._compute(_MOST_WAITING // 2)

    def wait(self) -> None:
        self.waits += 1
        self._compute(len(self._calls))

    def mark(self) -> Callable[[], None]:
        """What waits for the calls until now alone."""
        asked = self._asked

        def wait() -> None:
            self.waits += 1
            self._compute(max(0, asked - self._asked + len(self._calls)))

        return wait

    def _compute(self, count: int) -> None:
        calls, self._calls = self._calls[:count], self._calls[count:]
        with _disable_current_modes(), torch.no_grad():
            for call in calls:
                call()


QUEUE = Queue()
# Pinned memory by its address: without an accelerator PyTorch has none.
_pinned: dict[int, torch.UntypedStorage] = {}


def is_pinned(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in _pinned


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
        return f"OnDevice({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatched(func, args, kwargs or {})


@contextmanager
def pretend_device() -> Iterator[None]:
    """Within, tensors can be made on the device."""
    with _Dispatched(), _Constructed():
        yield
    QUEUE.wait()


class _Constructed(TorchFunctionMode):
    """`torch.tensor` and `tolist` read and fill memory where no dispatch mode is asked."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and _is_ours(kwargs.get("device")):
            del kwargs["device"]
            return func(*args, **kwargs).to(DEVICE)
        if func is torch.Tensor.tolist and isinstance(args[0], OnDevice):
            QUEUE.wait()
            return args[0].memory.tolist()
        if func is torch.Tensor.pin_memory:
            return _pin(args[0].clone())
        if kwargs.pop("pin_memory", False):
            return _pin(func(*args, **kwargs))
        return func(*args, **kwargs)


class _Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatched(func, args, kwargs or {})


class PretendPlatform(CpuPlatform):
    """Its activations are float32 unless another type is asked for."""

    name = "pretend"
    kind = PlatformEnum.OOT
    device_type = "pretend"
    dispatch_key = "native"

    @property
    def device(self) -> torch.device:
        return DEVICE

    def inference_mode(self) -> Any:
        return torch.no_grad()  # tensors over another's memory have no version in inference mode

    def supported_dtypes(self) -> tuple[torch.dtype, ...]:
        return torch.float32, torch.bfloat16, torch.float16

    def synchronize(self) -> None:
        QUEUE.wait()

    def is_pin_memory_available(self) -> bool:
        return True


def dispatched(func: Any, args: Any, kwargs: Any) -> Any:
    tensors = [item for item in tree_flatten((args, kwargs))[0] if isinstance(item, torch.Tensor)]
    ours = [item for item in tensors if isinstance(item, OnDevice)]
    if func in _COPIES and (ours or _is_ours(kwargs.get("device"))):
        return _copied(func, args, kwargs)
    if not ours and not _is_ours(kwargs.get("device")):
        return func(*args, **kwargs)
    strangers = [item for item in tensors if not isinstance(item, OnDevice) and item.dim()]
    if strangers:
        raise RuntimeError(f"{func} was given tensors of {DEVICE} and of {strangers[0].device}")
    if "device" in kwargs and kwargs["device"] is not None:
        if not _is_ours(kwargs["device"]):  # such as zeros_like(ours, device="cpu")
            return func(*tree_map_only(OnDevice, lambda item: item.memory, args), **kwargs)
        kwargs = {**kwargs, "device": _CPU}
    inner = tree_map_only(OnDevice, lambda item: item.memory, (args, kwargs))
    schema = func._schema
    if schema.is_mutable:  # what was written is what is returned
        QUEUE.put(lambda: func(*inner[0], **inner[1]))
        outs = [kwargs[item.name] for item in schema.arguments if item.is_out and item.name in kwargs]
        return args[0] if not outs else outs[0] if len(outs) == 1 else tuple(outs)
    if any(item.alias_info is not None for item in schema.returns):  # a view
        return _wrapped(func(*inner[0], **inner[1]))
    try:
        shapes = func(*_on_meta(inner[0]), **_on_meta(inner[1]))
    except (NotImplementedError, RuntimeError):  # depends on values
        shapes = None
    if shapes is None or not all(isinstance(item, torch.Tensor) for item in tree_flatten(shapes)[0]):
        QUEUE.wait()
        return _wrapped(func(*inner[0], **inner[1]))
    found = tree_map_only(
        torch.Tensor, lambda like: torch.empty_strided(like.shape, like.stride(), dtype=like.dtype), shapes
    )

    def compute() -> None:
        arguments = tree_map_only(torch.Tensor, _widened, inner) if func in _IN_FLOAT64 else inner
        results = func(*arguments[0], **arguments[1])
        for made, values in zip(tree_flatten(found)[0], tree_flatten(results)[0], strict=True):
            made.copy_(values)

    QUEUE.put(compute)
    return _wrapped(found)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _copied(func: Any, args: Any, kwargs: Any) -> Any:
    """`copy_` and `to`, between devices or within ours."""
    in_place = func is _aten.copy_.default
    source = args[1] if in_place else args[0]
    late = bool(args[2] if in_place and len(args) > 2 else kwargs.get("non_blocking", False))
    if in_place:
        target = args[0]
        is_ours = isinstance(target, OnDevice)
        memory = target.memory if is_ours else target
    else:
        device = kwargs.get("device")
        is_ours = isinstance(source, OnDevice) if device is None else _is_ours(device)
        like = source.memory if isinstance(source, OnDevice) else source
        plain = {**kwargs, "device": torch.device("meta")}
        shape = func(torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta"), **plain)
        memory = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)
        target = OnDevice(memory) if is_ours else memory
    if isinstance(source, OnDevice):
        values = source.memory
        QUEUE.put(lambda: memory.copy_(values))
        if not is_ours and not (late and is_pinned(memory)):
            QUEUE.wait()
        return target
    if source.dim() == 0 and not late:  # a number, which goes with the call
        values = source.clone()
    elif late and is_pinned(source):
        QUEUE.pinned += 1
        values = source
    else:
        QUEUE.pageable += 1
        values = source.clone()
    QUEUE.put(lambda: memory.copy_(values))
    return target


def _pin(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    _pinned[storage.data_ptr()] = storage
    return tensor


def _is_ours(device: Any) -> bool:
    return device is not None and torch.device(device).type == DEVICE.type


def _wrapped(tensors: Any) -> Any:
    return tree_map_only(torch.Tensor, OnDevice, tensors)


def _on_meta(arguments: Any) -> Any:
    def of(item: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device="meta")

    moved = tree_map_only(torch.Tensor, of, arguments)
    return tree_map_only(torch.device, lambda item: torch.device("meta"), moved)
