"""What work costs whatever the engine: bytes read and operations done, and the least time a machine takes for them.

Owns the arithmetic of floors. A floor is what no engine with these weights can beat: every step reads all weights that
multiply (linear layers and LM head, a tied table once) and the keys and values its rows see, every token is multiplied
by every linear layer, every sampled row by the LM head. Norms, rotations and softmax count as free.
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
class AttentionCost:
    """One attention layer: operations per pair of query and key, KV cache bytes per token, and its window."""

    operations_per_pair: int
    bytes_per_token: int
    window: int | None


@dataclass(frozen=True)
class Rates:
    """What the machine can do: bytes read per second, float32 operations per second (a multiply-add is two)."""

    bytes_per_s: float
    operations_per_s: float


@dataclass(frozen=True)
class Phase:
    """The work of a part of a workload."""

    matmul_operations: int
    attention_operations: int
    bytes_read: int

    @property
    def operations(self) -> int:
        return self.matmul_operations + self.attention_operations

    def floor_seconds(self, rates: Rates) -> float:
        return max(self.operations / rates.operations_per_s, self.bytes_read / rates.bytes_per_s)


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

    def matmul_operations(self, tokens: int, sampled: int) -> int:
        return 2 * (self.linear_weights * tokens + self.head_weights * sampled)

    def attention_operations(self, start: int, end: int) -> int:
        """Of one row's tokens at positions start to end - 1."""
        return sum(
            count * layer.operations_per_pair * _pairs(start, end, layer.window)
            for layer, count in self.attention.items()
        )

    def kv_bytes(self, start: int, end: int) -> int:
        """Read when one row's positions start to end - 1 are computed one by one."""
        return sum(
            count * layer.bytes_per_token * _pairs(start, end, layer.window) for layer, count in self.attention.items()
        )


def prefill_cost(model: ModelCost, workload: Workload) -> Phase:
    """All prompts, in one pass over the weights, a shared prefix once, and one sampled token per row."""
    shared = workload.recipe.shared_prefix
    spans = [(shared if row else 0, len(prompt)) for row, prompt in enumerate(workload.prompts)]
    tokens = sum(end - start for start, end in spans)
    return Phase(
        model.matmul_operations(tokens, len(spans)),
        sum(model.attention_operations(*span) for span in spans),
        model.bytes_per_step,
    )


def decode_cost(model: ModelCost, workload: Workload) -> Phase:
    """The tokens after each row's first, all rows in the same steps."""
    steps = workload.recipe.max_tokens - 1
    spans = [(len(prompt), len(prompt) + steps) for prompt in workload.prompts]
    tokens = steps * len(spans)
    return Phase(
        model.matmul_operations(tokens, tokens),
        sum(model.attention_operations(*span) for span in spans),
        steps * model.bytes_per_step + sum(model.kv_bytes(*span) for span in spans),
    )


def count_model(model: nn.Module, kv_cache_dtype: torch.dtype) -> ModelCost:
    """Count a built model, loaded or on the meta device, quantized or not."""
    head = getattr(model, "lm_head", None)
    quantized = [module for module in model.modules() if hasattr(module, "quant_kind")]
    linear = [module for module in quantized if module.quant_kind == "linear"]
    lookup_only = [module for module in quantized if module.quant_kind == "embedding" and module is not head]
    total = _stored_bytes(model.modules())
    return ModelCost(
        parameters=sum(_elements(module) for module in model.modules()),
        linear_weights=sum(_matrix_elements(module) for module in linear),
        head_weights=0 if head is None else _matrix_elements(head),
        bytes_per_step=total - _stored_bytes(iter(lookup_only)),
        weight_bytes=total,
        attention=Counter(
            _attention_cost(module, kv_cache_dtype) for module in model.modules() if isinstance(module, Attention)
        ),
    )


def stored_tensors(module: Any) -> list[torch.Tensor]:
    """The weights a module itself holds. What a kernel packed need not be a parameter, but is an attribute."""
    found = list(module.parameters(recurse=False))
    if hasattr(module, "quant_kind"):
        found += [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
        found += list(module.buffers(recurse=False))
    return found


def _stored_bytes(modules: Iterator[nn.Module]) -> int:
    tensors = {id(tensor): tensor for module in modules for tensor in stored_tensors(module)}
    return sum(tensor.nbytes for tensor in tensors.values())


def _elements(module: Any) -> int:
    """Logical weights a module itself holds, however they are stored."""
    if not hasattr(module, "quant_kind"):
        return sum(parameter.numel() for parameter in module.parameters(recurse=False))
    bias = getattr(module, "bias", None)
    return _matrix_elements(module) + (0 if bias is None else bias.numel())


def _matrix_elements(module: Any) -> int:
    if module.quant_kind == "embedding":
        return module.vocab_size * module.hidden_size
    return module.input_size * module.output_size


def _attention_cost(layer: Attention, kv_cache_dtype: torch.dtype) -> AttentionCost:
    bytes_per_token = layer.kv_cache_spec(kv_cache_dtype).bytes_per_token()
    return AttentionCost(4 * layer.num_heads * layer.head_size, bytes_per_token, layer.sliding_window)


def _pairs(start: int, end: int, window: int | None) -> int:
    """Keys seen by the positions start to end - 1 together; position p sees min(p + 1, window)."""
    bend = end if window is None else min(max(window, start), end)
    triangle = (bend * (bend + 1) - start * (start + 1)) // 2
    return triangle + (end - bend) * (window or 0)
