"""Per-layer embeddings (Gemma 3n and 4): every layer has an embedding of its own of each token.

The table of all layers is one tensor; each layer has its part of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from llm.base.watch import Patchable
from llm.kernels.select import backend_of_construction
from llm.layers.activation import PLAIN_ACTIVATIONS
from llm.layers.embedding import VocabParallelEmbedding
from llm.layers.linear import ReplicatedLinear
from llm.models.decoder.part import BuildContext, NormConfig
from llm.quantization.unquantized import new_parameter


@dataclass(frozen=True)
class PerLayerEmbedding:
    """`size` channels in each of `layers` layers, for the ids below `vocab_size`."""

    vocab_size: int
    size: int
    layers: int
    norm: NormConfig


class PerLayerInputs(Patchable):
    """ids int64 [N] and their embedding float [N, H] -> float [N, layers * size]."""

    def __init__(self, config: PerLayerEmbedding, context: BuildContext, prefix: str) -> None:
        super().__init__()
        hidden, width = context.hidden_size, config.layers * config.size
        self.embed_tokens_per_layer = VocabParallelEmbedding(
            config.vocab_size, width, prefix=f"{prefix}.embed_tokens_per_layer", **context.table
        )
        self.per_layer_model_projection = ReplicatedLinear(
            hidden,
            width,
            bias=False,
            prefix=f"{prefix}.per_layer_model_projection",
            **context.linear,
        )
        self.per_layer_projection_norm = config.norm.build(config.size, context)
        self.size, self.scale = config.size, hidden**-0.5

    def forward(self, ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        projected = self.per_layer_model_projection(embedded) * self.scale
        by_layer = projected.view(projected.shape[0], -1, self.size)
        own = self.embed_tokens_per_layer(ids) * self.size**0.5
        return (self.per_layer_projection_norm(by_layer).view(projected.shape) + own) * 2.0**-0.5


class PerLayerGate(Patchable):
    """norm(projection(act(gate(x)) * inputs)): x float [N, H], inputs float [N, size] -> [N, H]."""

    def __init__(self, size: int, activation: str, norm: NormConfig, context: BuildContext, prefix: str) -> None:
        super().__init__()
        hidden, linear = context.hidden_size, context.linear
        self.per_layer_input_gate = ReplicatedLinear(
            hidden, size, bias=False, prefix=f"{prefix}.per_layer_input_gate", **linear
        )
        self.per_layer_projection = ReplicatedLinear(
            size, hidden, bias=False, prefix=f"{prefix}.per_layer_projection", **linear
        )
        self.post_per_layer_input_norm = norm.build(hidden, context)
        self.act_fn = PLAIN_ACTIVATIONS[activation]()
        self._ops = backend_of_construction().ops

    def forward(self, x: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        gated = self._ops.multiply(self.act_fn(self.per_layer_input_gate(x)), inputs)
        return self.post_per_layer_input_norm(self.per_layer_projection(gated))


class Factor(Patchable):
    """x float [N, H] times a trained number, which the checkpoint stores as [1]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        # One per channel: the kernel multiplies rows.
        self.value = new_parameter(torch.ones(width), _fill)
        self._ops = backend_of_construction().ops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._ops.multiply(x, self.value.expand(x.shape))


def _fill(param: nn.Parameter, loaded: torch.Tensor, shard_id: object = None) -> int:
    if loaded.numel() != 1:
        raise ValueError(f"has shape {list(loaded.shape)}, the model needs [1]")
    param.data.fill_(loaded.item())
    return param.numel()
