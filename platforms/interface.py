"""`Platform`, the base class of the built-in platforms and of plugins.

It names the backend, which has the kernels, the attention backend and the model runner by class path. Hooks that were
written for vLLM get arguments by their names there, and a config to change in place: what they set reaches `LLMArgs`,
or is refused.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from enum import Enum, auto
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from llm.config.compilation import CompilationConfig
from llm.config.engine import LLMArgs
from llm.errors import PluginError, ValidationError
from llm.forward import StateSpec
from llm.platforms.limits import host_memory

if TYPE_CHECKING:
    from llm.plugins import Plugin


class PlatformEnum(Enum):
    """The kinds of platform, as vLLM names them."""

    CUDA = auto()
    ROCM = auto()
    TPU = auto()
    XPU = auto()
    CPU = auto()
    OOT = auto()
    UNSPECIFIED = auto()


# The kind that a class states -> the suffix of the `forward_*` that a `CustomOp` binds on it.
_DISPATCH_KEYS = {
    PlatformEnum.CUDA: "cuda",
    PlatformEnum.ROCM: "hip",
    PlatformEnum.TPU: "tpu",
    PlatformEnum.XPU: "xpu",
    PlatformEnum.CPU: "cpu",
    PlatformEnum.OOT: "oot",
    PlatformEnum.UNSPECIFIED: "native",
}


class Platform:
    """One kind of device. A process computes on one platform, chosen once.

    A plugin derives from this class, or from a built-in platform that its device resembles. Methods without a default
    raise NotImplementedError, and unknown names AttributeError; nothing returns None for "unknown".

    Attributes:
        name: the value of `device=` and `LLM_PLATFORM`; for a plugin, the name of its entry point.
        kind: OOT for a plugin. A class that states it as vLLM's `_enum` gets the `dispatch_key` of that kind.
        device_type: torch's device type.
        index: which of the devices of its kind, as in `device="cuda:1"`.
        device_name: what `get_device_name` says, unless that is overridden.
        worker_cls: class path of the `ModelRunner` that `check_and_update_config` chose; "": `get_model_runner_cls`'s.
        dispatch_key: the suffix of the `forward_*` method that a `CustomOp` binds.
        simple_compile_backend: the default compiler of operations that are off.
        supported_quantization: the supported quantization methods; None or none: every registered one.
        batched_tokens: `max_num_batched_tokens` where none is asked for.
        contract_version: set by plugins, see `llm.plugins`; the built-in platforms have none.
        plugin: the plugin of the platform, None for a built-in one.
    """

    name: str = ""
    kind: PlatformEnum = PlatformEnum.UNSPECIFIED
    device_type: str = ""
    index: int = 0
    device_name: str = ""
    worker_cls: str = ""
    dispatch_key: str = "native"
    simple_compile_backend: str = "inductor"
    supported_quantization: Sequence[str] | None = None
    # Enough tokens for a GEMM of a CPU to run at full speed. The temporaries of larger steps are too large for malloc's
    # heap: each operation maps new memory, and the page faults cost more than the larger step saves.
    batched_tokens: int = 512
    contract_version: int
    plugin: Plugin | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        kind = vars(cls).get("_enum")
        if kind is not None:
            # A dispatch_key beside it is torch's, as in vLLM, where `_enum` alone decides.
            cls.kind, cls.dispatch_key = kind, _DISPATCH_KEYS[kind]

    def is_cuda(self) -> bool:
        return self.kind is PlatformEnum.CUDA

    def is_rocm(self) -> bool:
        return self.kind is PlatformEnum.ROCM

    def is_tpu(self) -> bool:
        return self.kind is PlatformEnum.TPU

    def is_xpu(self) -> bool:
        return self.kind is PlatformEnum.XPU

    def is_cpu(self) -> bool:
        return self.kind is PlatformEnum.CPU

    def is_out_of_tree(self) -> bool:
        return self.kind is PlatformEnum.OOT

    def is_unspecified(self) -> bool:
        return self.kind is PlatformEnum.UNSPECIFIED

    def is_cuda_alike(self) -> bool:
        """True for CUDA and ROCm."""
        return self.kind in (PlatformEnum.CUDA, PlatformEnum.ROCM)

    # --- Detection. ---

    @classmethod
    def detect(cls) -> tuple[bool, str]:
        """(True if the device is present, what was seen). Called on built-in platforms; imports no optional package."""
        raise NotImplementedError

    def why_not(self) -> str | None:
        """Why models cannot run although the device is present, None if they can."""
        return None

    # --- The device. ---

    @property
    def device(self) -> torch.device:
        """Where weights, caches and the tensors of a step are."""
        return torch.device(self.device_type, self.index) if self.index else torch.device(self.device_type)

    def get_device_name(self, device_id: int = 0) -> str:
        """The vendor's name of the device."""
        return self.device_name or self.device_type

    def get_device_capability(self, device_id: int = 0) -> tuple[int, int] | None:
        """(major, minor) for devices with a compute capability, else None."""
        return None

    def memory_total(self) -> int:
        """Bytes that the process may use, within the limits of its container; of torch's module for the device, if the
        platform does not say."""
        return host_memory()[0] if self.device_type == "cpu" else int(self._memory()[1])

    def memory_free(self) -> int:
        """Bytes that can be allocated without swapping or being killed."""
        return host_memory()[1] if self.device_type == "cpu" else int(self._memory()[0])

    def _memory(self) -> tuple[int, int]:
        """Bytes that are free, and all."""
        module = getattr(torch, self.device_type, None)
        if module is None or not hasattr(module, "mem_get_info"):
            what = f"torch.{self.device_type} has no mem_get_info"
            raise NotImplementedError(f"{what}; override memory_total and memory_free")
        found: tuple[int, int] = module.mem_get_info()
        return found

    def memory_used(self) -> int:
        """Bytes in use, by this and other processes."""
        return self.memory_total() - self.memory_free()

    def memory_of(self, call: Callable[[], object]) -> int | None:
        """Bytes that `call` needs at its peak beside what is allocated before; None, without a call: the platform
        cannot tell, and the KV cache is planned before weights are read."""
        return None

    def release_memory(self) -> None:
        """Return freed memory to the operating system."""

    def num_threads(self) -> int:
        """The most threads that may compute on the host."""
        return os.cpu_count() or 1

    def set_device(self, index: int) -> None:
        """Compute on device `index` from now on; raises `ValidationError` when there is none."""
        if index != 0:
            raise ValidationError(f"{self.name} has one device, 0; got {index}.", parameter="index", value=index)

    def synchronize(self) -> None:
        """Wait until all work queued on the device is done."""

    def manual_seed_all(self, seed: int) -> None:
        """Seed the device's generators. The engine never calls it: it draws from counter-based generators."""
        torch.manual_seed(seed)

    def inference_mode(self) -> AbstractContextManager[None]:
        """The context that a step runs in; restores all state it changes."""
        return torch.inference_mode()

    def is_pin_memory_available(self) -> bool:
        """True if copies from pinned memory are faster."""
        return False

    # --- What it supports. ---

    def supported_dtypes(self) -> tuple[torch.dtype, ...]:
        """Activation dtypes, the preferred one first; a plugin may have a property in its place."""
        return (torch.float32,)

    def verify_quantization(self, method: str) -> None:
        """Raise `ValidationError` if the platform does not support the quantization method."""
        known = self.supported_quantization
        if known and method not in known:
            raise ValidationError(
                f"quantization={method!r} is not computed on {self.name}; known: {', '.join(known)}.",
                parameter="quantization",
                value=method,
            )

    def get_backend_cls(self) -> str:
        """Class path of the `llm.kernels.backend.Backend` that computes the operations; the base's is plain PyTorch."""
        return "llm.kernels.reference.backend.ReferenceBackend"

    def get_attn_backend_cls(self, head_size: int) -> str:
        """Class path of the `AttentionBackend` of layers with heads of this size. It may take any of vLLM's arguments,
        which are passed by name (`llm.platforms.interface`)."""
        return "llm.layers.attention.PagedAttention"

    def get_model_runner_cls(self) -> str:
        """Class path of the `ModelRunner`."""
        return self.worker_cls or "llm.runner.model_runner.ModelRunner"

    def get_communicator_cls(self) -> str:
        """Class path of the `llm.layers.parallel.Communicator` of ranks; the base's serves every device, by way of the
        host."""
        return "llm.layers.communicators.HostCommunicator"

    # --- What it changes. ---

    def pre_register_and_update(self) -> None:
        """Called once, after the platform is chosen and before any file is read: register the plugin's classes."""

    def check_and_update_config(self, args: LLMArgs) -> LLMArgs:
        """The arguments to use, `dataclasses.replace(args, ...)`. Called for each `LLM`, before they are resolved.

        A method whose parameter is `vllm_config` gets a `llm.platforms.interface.VllmConfigView` to change in place.
        """
        return args

    def update_kv_cache_specs(self, specs: Sequence[StateSpec]) -> Sequence[StateSpec]:
        """The spec of each state of a model; may return subclasses."""
        return specs

    def import_kernels(self) -> None:
        """Load the libraries of its kernels. Called before each model is built, so it may be called again."""


def supported_dtypes(platform: Platform) -> tuple[torch.dtype, ...]:
    """Of a platform; in one written for vLLM it is a property."""
    found: object = platform.supported_dtypes
    return tuple(found() if callable(found) else found)  # type: ignore[arg-type]


# --- What plugins see of the config. ---

# Section -> its attributes, which are arguments of the same name.
_SECTIONS = {
    "model_config": ("model", "dtype", "quantization", "max_model_len", "seed", "enforce_eager"),
    "cache_config": ("block_size", "enable_prefix_caching"),
    "scheduler_config": ("max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill"),
}
_AUTO = "auto"


class _Section(SimpleNamespace):
    """A part of the config; only what is there can be set."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in vars(self):
            raise PluginError(
                f"a platform sets {name!r}, which is not in its config; there are {', '.join(vars(self))}"
            )
        super().__setattr__(name, value)


def _sizes(args: LLMArgs) -> dict[str, int]:
    ranks = args.tensor_parallel_size
    return {
        "tensor_parallel_size": ranks,
        "pipeline_parallel_size": 1,
        "data_parallel_size": args.data_parallel_size,
        "world_size": ranks,
    }


class VllmConfigView(_Section):
    """What `check_and_update_config(vllm_config)` reads and changes, before anything is decided; None: not given.

    Attributes:
        parallel_config: `worker_cls`, "auto" or the class path of an `llm.runner.model_runner.ModelRunner`; sizes, to
            be read.
        compilation_config: `custom_ops` (a list), `mode` and `backend`.
        model_config: arguments of `LLM`.
        cache_config: the same.
        scheduler_config: the same.
    """

    def __init__(self, args: LLMArgs, platform: Platform) -> None:
        compilation = CompilationConfig.of(
            args.compilation_config,
            default_backend=platform.simple_compile_backend,
            enforce_eager=args.enforce_eager,
        )
        sections = {
            name: _Section(**{item: getattr(args, item) for item in items}) for name, items in _SECTIONS.items()
        }
        super().__init__(
            **sections,
            parallel_config=_Section(worker_cls=_AUTO, **_sizes(args)),
            compilation_config=_Section(
                custom_ops=list(compilation.custom_ops), mode=compilation.mode, backend=compilation.backend
            ),
        )
        self.__dict__["_before"] = dict(vars(self.compilation_config), custom_ops=list(compilation.custom_ops))

    def updated(self, args: LLMArgs) -> LLMArgs:
        """The arguments with what was set."""
        now = {item: getattr(getattr(self, name), item) for name, items in _SECTIONS.items() for item in items}
        changed = {item: value for item, value in now.items() if value != getattr(args, item)}
        compilation = dict(vars(self.compilation_config))
        if compilation != self.__dict__["_before"]:
            changed["compilation_config"] = compilation
        for name, asked in _sizes(args).items():
            if getattr(self.parallel_config, name) != asked:
                raise PluginError(
                    f"a platform sets several devices: {name}, which is what its caller asked for, {asked}"
                )
        return replace(args, **changed)


def update_config(platform: Platform, args: LLMArgs) -> object:
    """What `check_and_update_config` makes of the arguments."""
    hook: Callable[..., object] = platform.check_and_update_config
    if "vllm_config" not in inspect.signature(hook).parameters:
        return hook(args)
    view = VllmConfigView(args, platform)
    answer = hook(view)
    if answer is not None:
        return answer
    chosen = view.parallel_config.worker_cls
    platform.worker_cls = "" if chosen == _AUTO else chosen
    return view.updated(args)


def called_by_name(function: Callable[..., Any], known: Mapping[str, object]) -> Any:
    """Call with those of the known arguments that it takes; `PluginError` if it needs another."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return function(**known)
    needs = [item.name for item in parameters if item.default is item.empty and item.kind is not item.VAR_POSITIONAL]
    unknown = [name for name in needs if name not in known]
    if unknown:
        raise PluginError(f"{function.__qualname__} asks for {', '.join(unknown)}; known are {', '.join(known)}")
    return function(**{item.name: known[item.name] for item in parameters if item.name in known})
