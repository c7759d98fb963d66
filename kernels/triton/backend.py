"""The Triton kernels as a backend, for platforms of GPUs; PyTorch's operations where Triton is not installed.

Decode steps are recorded as CUDA graphs, and steps with short prompts: to launch a layer's kernels one by one takes the
host about a millisecond, and the device less.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from llm.kernels.backend import CPU, OPERATIONS, Backend, NotRecordable, Operation, RecordedPart, StepSize
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
    "recurrent": ("causal_conv1d", "gated_delta_rule", "selective_scan", "mamba2_scan"),
    "vocabulary": ("log_softmax", "argmax", "gather_logprobs", "block_sums", "draw_nucleus"),
}
# Operations of PyTorch that compute an element from those at its place, or sum in one order along a row of fixed
# width.
_PLACEWISE = {
    *("silu", "gelu", "gelu_new", "quick_gelu", "relu", "relu2", "soft_cap", "xielu", "multiply", "add", "scale"),
    *("quantize_static", "top_k", "cut_below_largest", "divide_rows", "mix_two_experts"),
    *("causal_conv1d", "selective_scan", "mamba2_scan", "gated_delta_rule"),
    *("pack", "embedding", "quantize_weight", "quantize_weight_as", "column_squares", "decode_blocks"),
    *("select_rows", "ids_below"),
}


# Batch rows of the decode steps that are recorded; a step is padded to the next.
_GRAPH_ROWS = (1, 2, 4, *range(8, 64, 8), *range(64, 257, 16))
# Tokens of such a step, drafts included. The larger a step, the less there is between its kernels.
_MOST_GRAPH_TOKENS = 512
# Tokens and batch rows of recorded steps whose rows have any number of tokens. Attention has programs for as many lines
# of every row as all have together; those of no line end at once.
_PROMPT_TOKENS = (32, 64, 128, 192, 256, 384, 512, 768, 1024)
_PROMPT_ROWS = (8, 64)


class Graph:
    """Everything that a computation does on the device, as one CUDA graph. See `Recording`.

    What it computes in between is in memory that all graphs of a backend share: they are replayed one after the other.
    """

    refusal = ""

    def __init__(self, graph: torch.cuda.CUDAGraph, results: Sequence[torch.Tensor]) -> None:
        self._graph = graph
        self.results = results
        self.parts: Mapping[Hashable, RecordedPart] = {}

    def run(self, tokens: int = 0, first: int = 0, last: int | None = None) -> Sequence[torch.Tensor]:
        self._graph.replay()
        return [item[:tokens] for item in self.results] if tokens else self.results


class TritonBackend(Backend):
    """The kernels of this folder.

    Attributes:
        disagrees: why PyTorch computes operations that have a kernel: on this device the kernel is not right.
    """

    name = "triton"
    disagrees: Mapping[str, str] = MappingProxyType({})
    records_kernels_only = False  # a graph has whatever runs on the device
    most_recordings = 64
    exact = _PLACEWISE

    def __init__(
        self, kernels: Mapping[str, Operation], reason: str, device: torch.device = CPU, pins: bool = False
    ) -> None:
        super().__init__(kernels, reason, device, pins)
        self.records = device.type == "cuda"
        self._pool: Any = None

    @classmethod
    def of(cls, platform: Platform) -> Backend:
        """The kernels on the platform's device; PyTorch's operations, where Triton is not installed."""
        pins = platform.is_pin_memory_available()
        if importlib.util.find_spec("triton") is None:
            missing = "Triton is not installed: pip install 'offline-llm[gpu]' for the kernels of GPUs"
            return pytorch(missing, platform.device, pins)
        return _triton_backend(platform.device, pins)

    def step_sizes(self, tokens: int, rows: int, tokens_per_row: int) -> Sequence[tuple[StepSize, int | None]]:
        if not tokens_per_row:
            if tokens > _PROMPT_TOKENS[-1] or rows > _PROMPT_ROWS[-1]:
                return ()
            most = _PROMPT_TOKENS[bisect_left(_PROMPT_TOKENS, tokens)]
            return [(StepSize(most, _PROMPT_ROWS[bisect_left(_PROMPT_ROWS, rows)], is_whole=True), 1)]
        at = bisect_left(_GRAPH_ROWS, rows)
        if at == len(_GRAPH_ROWS):
            return ()
        size = StepSize(_GRAPH_ROWS[at] * tokens_per_row, _GRAPH_ROWS[at], tokens_per_row)
        return [(size, 1)] if size.tokens <= _MOST_GRAPH_TOKENS else ()

    def record(
        self,
        compute: Callable[[int], Sequence[torch.Tensor]],
        tokens: int = 0,
        size: StepSize | None = None,
        fill: Callable[[int], None] | None = None,
    ) -> Graph:
        if fill is not None:
            fill(0)
        compute(tokens)  # compiles what has not been: nothing may be while a graph is captured
        if fill is not None:
            fill(tokens)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        try:
            # Other threads may go on asking for page-locked memory.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                results = compute(tokens)
        except RuntimeError as error:  # it waits for the device, to read a number; nothing has been computed
            torch.cuda.synchronize(self.device)
            raise NotRecordable(f"a step cannot be captured: {str(error).splitlines()[0]}") from error
        recorded = Graph(graph, results)
        recorded.run()
        return recorded

    def clear(self) -> None:
        self._pool = None


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
