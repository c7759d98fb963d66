"""The sizes of a built model: what a step reads and computes, whatever the backend.

Every step reads all GEMM weights (linear layers and LM head, a tied table once) and the KV cache of
its requests, and reads and writes their recurrent states. Every token goes through every linear layer, every sampled
position through the LM head. Of a layer of experts it is as many as a token chooses: a step of several tokens reads
more of them. Norms, rotary embeddings and softmax count as free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from llm.engine.boundary import AttentionCost, ModelCost
from llm.forward import StateSpec
from llm.kernels.weight import ExpertWeights, Weight
from llm.layers.attention import Attention
from llm.layers.embedding import VocabParallelEmbedding
from llm.layers.latent_attention import LatentAttention
from llm.layers.linear import LinearBase
from llm.layers.moe import FusedMoE


def count_model(model: nn.Module, kv_cache_dtype: torch.dtype, states: Sequence[StateSpec] = ()) -> ModelCost:
    """The sizes of a built model, quantized or not, whose layers keep these states."""
    head = getattr(model, "lm_head", None)
    layers = [module for module in model.modules() if hasattr(module, "quant_kind")]
    lookup_only = [module for module in layers if module.quant_kind == "embedding" and module is not head]
    attention = [module for module in model.modules() if isinstance(module, Attention | LatentAttention)]
    total = _stored_bytes(model.modules())
    mixtures = [module for module in model.modules() if isinstance(module, FusedMoE)]
    experts = [_stored_bytes(module.modules()) for module in mixtures]
    unchosen = sum(round(size * _unchosen(module)) for size, module in zip(experts, mixtures, strict=True))
    linear = sum(_matrix_elements(module) for module in layers if module.quant_kind != "embedding")
    unmet = sum(
        round(sum(_matrix_elements(part) for part in module.modules() if hasattr(part, "quant_kind")) * share)
        for module in model.modules()
        if (share := _unchosen(module))
    )
    return ModelCost(
        parameters=sum(_elements(module) for module in model.modules()),
        linear_weights=linear - unmet,
        head_weights=0 if head is None else _matrix_elements(head),
        bytes_per_step=total - _stored_bytes(iter(lookup_only)) - unchosen,
        chosen_bytes=sum(experts) - unchosen,
        weight_bytes=total,
        attention=Counter(attention_cost(module, kv_cache_dtype) for module in attention),
        state_bytes=sum(spec.bytes_per_request() for spec in states),
        arithmetic=frozenset(
            (weight.kind, weight.activations) for weight in _weights(model) if weight.activations != "float"
        ),
    )


def _weights(model: nn.Module) -> Iterator[Weight]:
    """The packed weights of all layers."""
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, ExpertWeights):
                yield from (*value.gate_up, *value.down)
            elif isinstance(value, Weight):
                yield value


def _unchosen(module: nn.Module) -> float:
    """The share of its experts that a token does not go to; 0 for anything but a layer of experts."""
    return 1 - module.top_k / module.num_experts if isinstance(module, FusedMoE) else 0.0


def stored_tensors(module: nn.Module) -> list[torch.Tensor]:
    """The weights that a module itself holds. Packed weights may be attributes instead of parameters."""
    found: list[torch.Tensor] = list(module.parameters(recurse=False))
    if hasattr(module, "quant_kind"):
        found += [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
        found += list(module.buffers(recurse=False))
    return found


def matrix_sizes(layer: nn.Module) -> tuple[int, int] | None:
    """(inputs, outputs) of a layer with a `quant_method`; None if its weight is not a single matrix."""
    if isinstance(layer, VocabParallelEmbedding):
        return layer.embedding_dim, layer.num_embeddings
    return (layer.input_size, layer.output_size) if isinstance(layer, LinearBase) else None


def attention_cost(layer: Attention | LatentAttention, kv_cache_dtype: torch.dtype) -> AttentionCost:
    bytes_per_token = layer.kv_cache_spec(kv_cache_dtype).bytes_per_token()
    return AttentionCost(layer.operations_per_pair, bytes_per_token, layer.sliding_window)


def _stored_bytes(modules: Iterator[nn.Module]) -> int:
    tensors = {id(tensor): tensor for module in modules for tensor in stored_tensors(module)}
    return sum(tensor.nbytes for tensor in tensors.values())


def _elements(module: nn.Module) -> int:
    """Number of logical weights that a module itself holds, however they are stored."""
    if not hasattr(module, "quant_kind"):
        return sum(parameter.numel() for parameter in module.parameters(recurse=False))
    bias = getattr(module, "bias", None)
    return _matrix_elements(module) + (0 if bias is None else bias.numel())


def _matrix_elements(layer: nn.Module) -> int:
    sizes = matrix_sizes(layer)
    return sizes[0] * sizes[1] if sizes else sum(tensor.numel() for tensor in stored_tensors(layer))
