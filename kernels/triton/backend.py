"""The Triton kernels as a backend, for platforms of GPUs; PyTorch's operations where Triton is not installed.

Owns the table of kernels, what holds of PyTorch's operations beside them, and steps recorded as graphs.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Mapping
from types import MappingProxyType

import torch

from llm.kernels.backend import CPU, OPERATIONS, Backend, Operation
from llm.kernels.reference.backend import pytorch
from llm.platforms.interface import Platform

# The modules here, and the operations that each computes.
KERNELS = {
    "gemm": ("linear", "quantize_per_token", "heads_linear", "lora", "lora_embedding"),
    "attention": ("write_kv_cache", "paged_attention", "write_latent_cache", "latent_attention", "kv_cache_shapes"),
    "elementwise": (
        *("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm", "gated_rms_norm", "rotary_embedding"),
        *("silu_and_mul", "mul_and_silu", "gelu_and_mul", "gelu_and_mul_sparse"),
    ),
    "moe": ("select_experts", "experts"),
    "vocabulary": ("log_softmax", "argmax", "gather_logprobs", "block_sums", "draw_nucleus"),
}
# Operations of PyTorch that compute an element from those at its place, or sum in one order along a row of fixed
# width.
_PLACEWISE = {
    *("gelu", "gelu_new", "quick_gelu", "relu", "relu2", "soft_cap", "xielu", "multiply", "add", "scale"),
    *("quantize_static", "top_k", "cut_below_largest", "mix_two_experts"),
    *("causal_conv1d", "selective_scan", "mamba2_scan"),
    *("pack", "embedding", "quantize_weight", "quantize_weight_as", "decode_blocks", "select_rows", "ids_below"),
}


class TritonBackend(Backend):
    """The kernels of this folder.

    Attributes:
        disagrees: why PyTorch computes operations that have a kernel: on this device the kernel is not right.
    """

    name = "triton"
    disagrees: Mapping[str, str] = MappingProxyType({})
    records_kernels_only = False  # a graph has whatever runs on the device

    @classmethod
    def of(cls, platform: Platform) -> Backend:
        """The kernels on the platform's device; PyTorch's operations, where Triton is not installed."""
        pins = platform.is_pin_memory_available()
        if importlib.util.find_spec("triton") is None:
            missing = "Triton is not installed: pip install 'offline-llm[gpu]' for the kernels of GPUs"
            return pytorch(missing, platform.device, pins)
        return _triton_backend(platform.device, pins)

    @property
    def invariant(self) -> tuple[bool, str]:
        missing = [name for name in self.lacks if name not in _PLACEWISE]
        if missing:
            return False, f"PyTorch computes {', '.join(missing)}: rounding depends on the batch"
        return True, "Triton kernels reduce in one fixed order"


def kernel(name: str) -> Operation:
    """The function of an operation; KeyError where there is none."""
    module = next((module for module, names in KERNELS.items() if name in names), None)
    if module is None:
        raise KeyError(name)
    return getattr(importlib.import_module(f"llm.kernels.triton.{module}"), name)


def kernel_names() -> list[str]:
    """The operations that have a kernel, in the order of `OPERATIONS`."""
    known = {name for names in KERNELS.values() for name in names}
    return [name for name in OPERATIONS if name in known]


@functools.cache
def _triton_backend(device: torch.device = CPU, pins: bool = False) -> TritonBackend:
    from llm.kernels.state import private_cache
    from llm.kernels.triton import check

    kernels = {name: kernel(name) for name in kernel_names()}
    wrong: dict[str, str] = {}
    if device.type == "cuda":  # elsewhere they are interpreted, for tests
        kernels, wrong = check.agreeing(kernels, device, private_cache())
    backend = TritonBackend(kernels, "Triton is installed", device, pins)
    backend.disagrees = wrong
    return backend
