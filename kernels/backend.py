"""How a platform computes: the one object that layers, quantization methods, sampler and runner ask for operations.

Owns `Backend` and the table of operations; `llm.kernels.select` gives a platform's backend. An operation has one name
and one signature. `kernels/reference` defines it in plain PyTorch, and a backend computes it with a kernel of its own
or leaves it to the definition.

A new backend is a folder beside `cpu/` with a subclass of `Backend`, and one line: the `Platform.get_backend_cls` that
names it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import torch

from llm.platforms.interface import Platform

CPU = torch.device("cpu")

# Operation -> the module of kernels/reference that defines it.
OPERATIONS: dict[str, str] = {
    "pack": "linear",
    "linear": "linear",
    "embedding": "linear",
    "quantize_per_token": "quantized",
    "quantize_static": "quantized",
    "rms_norm": "norm",
    "add_rms_norm": "norm",
    "layer_norm": "norm",
    "add_layer_norm": "norm",
    "rotary_embedding": "rotary",
    "kv_cache_shapes": "attention",
    "write_kv_cache": "attention",
    "paged_attention": "attention",
    "silu_and_mul": "activation",
    "mul_and_silu": "activation",
    "gelu_and_mul": "activation",
    "gelu": "activation",
    "gelu_new": "activation",
    "quick_gelu": "activation",
    "relu": "activation",
    "relu2": "activation",
    "soft_cap": "activation",
    "log_softmax": "vocabulary",
    "argmax": "vocabulary",
    "top_k": "vocabulary",
    "gather_logprobs": "vocabulary",
    "block_sums": "vocabulary",
    "draw_nucleus": "vocabulary",
    "cut_below_largest": "vocabulary",
}

Operation = Callable[..., Any]


class NotRecordable(Exception):
    """A step cannot be recorded; the message names what stands in the way."""


class Program(Protocol):
    """A recorded computation. Objects in `kept` live as long as it does."""

    kept: list[Any]

    def run(self) -> bool:
        """Compute again, from what its inputs hold now; False: an input was refused, and the outputs are undefined."""


class Operations:
    """Every operation as an attribute: `ops.rms_norm(x, weight, eps)`."""

    def __init__(self, functions: Mapping[str, Operation]) -> None:
        vars(self).update(functions)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Operation: ...


def definition(name: str) -> Operation:
    """The operation `name` in plain PyTorch; KeyError for a name that is not in `OPERATIONS`."""
    return getattr(importlib.import_module(f"llm.kernels.reference.{OPERATIONS[name]}"), name)


class Backend:
    """The operations of one platform, and what is promised about them.

    Args:
        kernels: operation -> this backend's own implementation. The rest are the definitions in PyTorch.
        reason: why this backend was chosen.
        device: where its tensors are.
        pins: copies to `device` go through page-locked memory.

    Attributes:
        name: what it is called in explanations.
        variant: which of several builds this is, e.g. an instruction set; "": there is one.
        ops: all operations.
        records: `record` works.
        rounds_bf16_inputs: GEMMs with bfloat16 weights are faster with activations rounded to bfloat16, so that is
            what they read where the model allows it (`Construction.may_round`).
    """

    name: ClassVar[str] = ""
    variant: str = ""
    records: bool = False
    rounds_bf16_inputs: bool = False

    def __init__(
        self,
        kernels: Mapping[str, Operation],
        reason: str,
        device: torch.device = CPU,
        pins: bool = False,
    ) -> None:
        self.reason = reason
        self.device = device
        self.pins = pins
        self._own = frozenset(kernels)
        self.ops = Operations({name: kernels.get(name) or definition(name) for name in OPERATIONS})

    @classmethod
    def of(cls, platform: Platform) -> Backend:
        """The backend of `platform`. Asked for every layer, so it must answer with the same object while it can.

        May be another class's, when this one cannot compute here; its `reason` says why.
        """
        raise NotImplementedError

    # --- What it computes, and what it promises. ---

    def op(self, name: str) -> Operation:
        """The operation `name`; KeyError for a name that is not in `OPERATIONS`."""
        return vars(self.ops)[name]

    def computes(self, *names: str) -> bool:
        """Whether all of these operations have a kernel of this backend."""
        return self._own.issuperset(names)

    def source(self, name: str) -> str:
        """What `op(name)` is, for explanations: "cpu kernel avx512_vnni" or "PyTorch"."""
        return f"{self.name} kernel {self.variant}".rstrip() if name in self._own else "PyTorch"

    @property
    def invariant(self) -> tuple[bool, str]:
        """Whether every operation's bits are independent of the batch, and why (not)."""
        missing = [name for name in OPERATIONS if name not in self._own]
        if missing:
            return False, f"PyTorch computes {', '.join(missing)}: rounding depends on the batch"
        return True, f"{self.name} kernels {self.variant} reduce in one fixed order"

    # --- Memory. ---

    def empty(self, *shape: int) -> torch.Tensor:
        """An uninitialised float32 tensor for a result."""
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def kv_cache(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeros for one tensor of a layer's state, such as its keys; memory is touched when written."""
        if self.device.type == "cpu":
            return _untouched_zeros(shape, dtype)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def upload(self, array: np.ndarray) -> torch.Tensor:
        """The array on this backend's device; on a CPU in the memory that it has."""
        tensor = torch.from_numpy(array)
        if self.device.type == "cpu":
            return tensor
        return (tensor.pin_memory() if self.pins else tensor).to(self.device, non_blocking=self.pins)

    def clear(self) -> None:
        """Free the memory that is kept for later results, and end the threads; both come again with the next call."""

    # --- Recording. ---

    def record(self) -> AbstractContextManager[Program]:
        """A context that computes as usual and notes what is computed, as a program that does the same again.

        Raises:
            NotRecordable: something computed that the program could not repeat; raised inside the context.
        """
        raise NotRecordable(f"the {self.name} backend records nothing")


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros by calloc: `torch.zeros` would write, and so occupy, every page at once."""
    count = int(np.prod(shape)) * dtype.itemsize
    storage = torch.from_numpy(np.zeros(count, dtype=np.uint8)).untyped_storage()
    # Not a view: a view holds its base, and `ModelRunner.close` could not free what somebody else refers to.
    return torch.empty(0, dtype=dtype).set_(storage).resize_(shape)
