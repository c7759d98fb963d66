"""What work costs whatever the engine: bytes read and operations done, and the least time a machine takes for them.

Owns the arithmetic of floors: max(operations / GEMM rate, bytes / read bandwidth), of prefill and of decode apart.
Every step reads all weights that multiply (linear layers and LM head, a tied table once) and the keys and values its
rows see; every token is multiplied by every linear layer, every sampled row by the LM head. Norms, rotations and
softmax count as free. The GEMM rate is float32's: kernels that compute in fewer bits can be faster than this floor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from llm.bench.workloads import Workload
from llm.layers.attention import Attention


@dataclass(frozen=True)
class Rates:
    """What the machine can do: bytes read per second, float32 operations per second (a multiply-add is two)."""

    bytes_per_s: float
    operations_per_s: float


@dataclass(frozen=True)
class Phase:
    """The work of a part of a workload."""

    operations: int = 0
    bytes_read: int = 0

    def __add__(self, other: Phase) -> Phase:
        return Phase(self.operations + other.operations, self.bytes_read + other.bytes_read)

    def floor_seconds(self, rates: Rates) -> float:
        return max(self.operations / rates.operations_per_s, self.bytes_read / rates.bytes_per_s)


@dataclass(frozen=True)
class AttentionCost:
    """One attention layer: operations per pair of query and key, KV cache bytes per token, and its window."""

    operations_per_pair: int
    bytes_per_token: int
    window: int | None


@dataclass(frozen=True)
class ModelCost:
    """What a model costs.

    Attributes:
        parameters: elements of all weights, a tied table once.
        linear_weights: elements of the linear layers' matrices.
        head_weights: elements of the LM head's.
        bytes_per_step: stored bytes that one step reads, however many its rows: everything but an untied embedding.
        weight_bytes: stored bytes of everything.
        attention: the attention layers, and how many there are of each.
    """

    parameters: int
    linear_weights: int
    head_weights: int
    bytes_per_step: int
    weight_bytes: int
    attention: Counter[AttentionCost] = field(default_factory=Counter)

    def operations(self, spans: list[tuple[int, int]], sampled: int) -> int:
        """Of rows that compute the positions start to end - 1 and sample `sampled` tokens together."""
        tokens = sum(end - start for start, end in spans)
        scores = sum(
            count * layer.operations_per_pair * pairs(*span, layer.window)
            for layer, count in self.attention.items()
            for span in spans
        )
        return 2 * (self.linear_weights * tokens + self.head_weights * sampled) + scores

    def kv_bytes(self, spans: list[tuple[int, int]]) -> int:
        """Read when these positions are computed one by one."""
        return sum(
            count * layer.bytes_per_token * pairs(*span, layer.window)
            for layer, count in self.attention.items()
            for span in spans
        )


def prefill_cost(model: ModelCost, workload: Workload) -> Phase:
    """All prompts, in one pass over the weights, a shared prefix once, and one sampled token per row."""
    shared = workload.recipe.shared_prefix
    spans = [(shared if row else 0, len(prompt)) for row, prompt in enumerate(workload.prompts)]
    return Phase(model.operations(spans, len(spans)), model.bytes_per_step)


def decode_cost(model: ModelCost, workload: Workload) -> Phase:
    """The tokens after each row's first, all rows in the same steps."""
    steps = workload.recipe.max_tokens - 1
    spans = [(len(prompt), len(prompt) + steps) for prompt in workload.prompts]
    return Phase(model.operations(spans, steps * len(spans)), steps * model.bytes_per_step + model.kv_bytes(spans))


def count_model(model: nn.Module, kv_cache_dtype: torch.dtype) -> ModelCost:
    """Count a built model, quantized or not."""
    head = getattr(model, "lm_head", None)
    layers = [module for module in model.modules() if hasattr(module, "quant_kind")]
    lookup_only = [module for module in layers if module.quant_kind == "embedding" and module is not head]
    attention = [module for module in model.modules() if isinstance(module, Attention)]
    total = _stored_bytes(model.modules())
    return ModelCost(
        parameters=sum(_elements(module) for module in model.modules()),
        linear_weights=sum(_matrix_elements(module) for module in layers if module.quant_kind != "embedding"),
        head_weights=0 if head is None else _matrix_elements(head),
        bytes_per_step=total - _stored_bytes(iter(lookup_only)),
        weight_bytes=total,
        attention=Counter(attention_cost(module, kv_cache_dtype) for module in attention),
    )


def stored_tensors(module: Any) -> list[torch.Tensor]:
    """The weights a module itself holds. What a kernel packed need not be a parameter, but is an attribute."""
    found = list(module.parameters(recurse=False))
    if hasattr(module, "quant_kind"):
        found += [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
        found += list(module.buffers(recurse=False))
    return found


def matrix_sizes(layer: Any) -> tuple[int, int] | None:
    """(inputs, outputs) of a layer with a `quant_method`; None for kinds that are no single matrix."""
    if layer.quant_kind == "embedding":
        return layer.embedding_dim, layer.num_embeddings
    return (layer.input_size, layer.output_size) if layer.quant_kind == "linear" else None


def attention_cost(layer: Attention, kv_cache_dtype: torch.dtype) -> AttentionCost:
    bytes_per_token = layer.kv_cache_spec(kv_cache_dtype).bytes_per_token()
    return AttentionCost(4 * layer.num_heads * layer.head_size, bytes_per_token, layer.sliding_window)


def pairs(start: int, end: int, window: int | None) -> int:
    """Keys seen by the positions start to end - 1 together; position p sees min(p + 1, window)."""
    bend = end if window is None else min(max(window, start), end)
    triangle = (bend * (bend + 1) - start * (start + 1)) // 2
    return triangle + (end - bend) * (window or 0)


def _stored_bytes(modules: Iterator[nn.Module]) -> int:
    tensors = {id(tensor): tensor for module in modules for tensor in stored_tensors(module)}
    return sum(tensor.nbytes for tensor in tensors.values())


def _elements(module: Any) -> int:
    """Logical weights a module itself holds, however they are stored."""
    if not hasattr(module, "quant_kind"):
        return sum(parameter.numel() for parameter in module.parameters(recurse=False))
    bias = getattr(module, "bias", None)
    return _matrix_elements(module) + (0 if bias is None else bias.numel())


def _matrix_elements(layer: Any) -> int:
    sizes = matrix_sizes(layer)
    return sizes[0] * sizes[1] if sizes else sum(tensor.numel() for tensor in stored_tensors(layer))
