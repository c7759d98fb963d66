"""What the engine asks of a platform.

Owns `Platform`, the base of the built-in platforms and of plugins'. Does not own kernels: those are chosen by
`CustomOp` and by the attention backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from enum import Enum, auto
from typing import TYPE_CHECKING

import torch

from llm.base.errors import ValidationError
from llm.forward import KVCacheSpec

if TYPE_CHECKING:
    from llm.config.engine import EngineArgs
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


class Platform:
    """One kind of device, chosen once per process; a process computes on one.

    A plugin derives from this, or from a built-in platform that its device resembles. What the base does not answer
    raises NotImplementedError, and a name that does not exist AttributeError; nothing answers None for "unknown".

    Attributes:
        name: what `device=` and `LLM_PLATFORM` take; a plugin's is the name of its entry point.
        kind: OOT for a plugin's.
        device_type: as torch spells it.
        dispatch_key: the suffix of the `forward_*` method that a `CustomOp` binds here.
        simple_compile_backend: what compiles the operations that are off, where the user does not say.
        supported_quantization: the methods it computes; None: every registered one.
        contract_version: of a plugin's, see `llm.plugins`; not of this package's own.
        plugin: the one that brought it, None for this package's own.
    """

    name: str = ""
    kind: PlatformEnum = PlatformEnum.UNSPECIFIED
    device_type: str = ""
    dispatch_key: str = "native"
    simple_compile_backend: str = "inductor"
    supported_quantization: tuple[str, ...] | None = None
    contract_version: int
    plugin: Plugin | None = None

    # --- Whether it is there. ---

    @classmethod
    def detect(cls) -> tuple[bool, str]:
        """(whether the device is there, what was seen); asked of built-in platforms. Imports nothing to find out."""
        raise NotImplementedError

    def why_not(self) -> str | None:
        """Why models cannot run here although the device is there, None when they can."""
        return None

    # --- The device. ---

    def get_device_name(self) -> str:
        """As its maker calls it."""
        raise NotImplementedError

    def get_device_capability(self) -> tuple[int, int] | None:
        """(major, minor) of devices that have such a number, else None."""
        return None

    def memory_total(self) -> int:
        """Bytes the process may use at most, limits of its container included."""
        raise NotImplementedError

    def memory_free(self) -> int:
        """Bytes that can still be allocated without swapping or being killed."""
        raise NotImplementedError

    def memory_used(self) -> int:
        """Bytes that are taken, by whomever."""
        return self.memory_total() - self.memory_free()

    def release_memory(self) -> None:
        """Give what was freed back to the operating system."""

    def set_device(self, index: int) -> None:
        """Compute on device `index` from now on; raises `ValidationError` when there is none."""
        if index != 0:
            raise ValidationError(f"{self.name} has one device, 0; got {index}.", parameter="index", value=index)

    def synchronize(self) -> None:
        """Wait until everything that was queued on the device is done."""

    def manual_seed_all(self, seed: int) -> None:
        """Seed the device's own generators. The engine never calls it: its draws come from counters."""
        torch.manual_seed(seed)

    def inference_mode(self) -> AbstractContextManager[None]:
        """The context that a step runs in; leaves everything as it was."""
        return torch.inference_mode()

    def is_pin_memory_available(self) -> bool:
        """Whether copies from page-locked memory are faster."""
        return False

    # --- What it computes. ---

    def supported_dtypes(self) -> tuple[torch.dtype, ...]:
        """Activation types, the preferred one first."""
        raise NotImplementedError

    def verify_quantization(self, method: str) -> None:
        """Raise `ValidationError` when weights stored by `method` cannot be computed here."""
        known = self.supported_quantization
        if known is not None and method not in known:
            raise ValidationError(
                f"quantization={method!r} is not computed on {self.name}; known: {', '.join(known) or 'none'}.",
                parameter="quantization",
                value=method,
            )

    def get_attn_backend_cls(self, head_size: int) -> str:
        """Class path of the `AttentionBackend` of layers with heads of this size."""
        return "llm.layers.attention.backend.PagedAttention"

    def get_model_runner_cls(self) -> str:
        """Class path of the `ModelRunner`."""
        return "llm.engine.model_runner.ModelRunner"

    def get_communicator_cls(self) -> str:
        """Class path of what moves tensors between devices; `ValidationError` where there is only one."""
        raise ValidationError(
            f"{self.name} computes on one device; there is no communicator.", parameter="device", value=self.name
        )

    # --- What it changes. ---

    def pre_register_and_update(self) -> None:
        """Called once, when the platform has been chosen and before anything is read: register what it brings."""

    def check_and_update_config(self, args: EngineArgs) -> EngineArgs:
        """The arguments to go on with, `dataclasses.replace(args, ...)`; called for each `LLM`, before they resolve."""
        return args

    def update_kv_cache_specs(self, specs: Sequence[KVCacheSpec]) -> Sequence[KVCacheSpec]:
        """The state that this platform keeps for each attention layer; may answer with subclasses of its own."""
        return specs

    def import_kernels(self) -> None:
        """Load what its operations call; called before a model is built, so it must bear being called again."""
