"""A layer of Gemma 3n: AltUp around it, LAuReL beside its attention, an embedding of its own of each token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llm.base.watch import Patchable
from llm.forward import ForwardBatch
from llm.layers.linear import ReplicatedLinear
from llm.models.decoder import BuildContext, LayerConfig, Norms
from llm.models.decoder.altup import AltUp, AltUpConfig
from llm.models.decoder.layer import DecoderLayer, PreAndPostNormLayer, Stream, add_norm
from llm.models.decoder.per_layer import PerLayerGate


@dataclass(frozen=True)
class Gemma3nNorms(Norms):
    """`laurel_rank`: of the two matrices of LAuReL; `per_layer_size`: channels of the layer's embedding."""

    altup: AltUpConfig
    laurel_rank: int
    per_layer_size: int

    def build(self, layer: LayerConfig, context: BuildContext, prefix: str) -> DecoderLayer:
        return Gemma3nLayer(layer, self, context, prefix)


class Laurel(Patchable):
    """Learned augmented residual layer: x + norm(right(left(x)))."""

    def __init__(self, norms: Gemma3nNorms, context: BuildContext, prefix: str) -> None:
        super().__init__()
        hidden, rank, common = context.hidden_size, norms.laurel_rank, context.common
        self.linear_left = ReplicatedLinear(
            hidden, rank, bias=False, prefix=f"{prefix}.linear_left", return_bias=False, **common
        )
        self.linear_right = ReplicatedLinear(
            rank, hidden, bias=False, prefix=f"{prefix}.linear_right", return_bias=False, **common
        )
        self.post_laurel_norm = norms.altup.norm.build(hidden, context)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.post_laurel_norm(self.linear_right(self.linear_left(x)))


class Gemma3nLayer(PreAndPostNormLayer):
    def __init__(self, layer: LayerConfig, norms: Gemma3nNorms, context: BuildContext, prefix: str) -> None:
        super().__init__(layer, norms.altup.norm, context, prefix)
        self.altup = AltUp(norms.altup, context, f"{prefix}.altup")
        self.laurel = Laurel(norms, context, f"{prefix}.laurel")
        self.per_layer = PerLayerGate(
            norms.per_layer_size, "gelu_pytorch_tanh", norms.altup.norm, context, f"{prefix}.per_layer"
        )
        self.active = norms.altup.active

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        batch: ForwardBatch,
        inputs: torch.Tensor | None = None,
    ) -> Stream:
        """`hidden`: all streams, float [N, streams * H]; `inputs`: the layer's embedding, float [N, per_layer_size]."""
        hidden = hidden if residual is None else hidden + residual
        predicted = self.altup.predict(hidden.split(self.altup.width, dim=-1))
        active = predicted[self.active]
        normed = self.input_layernorm(active)
        attended = self.post_attention_layernorm(self.self_attn(normed, batch))
        stream = (active + attended + self.laurel(normed)) * 2.0**-0.5
        normed, stream = add_norm(self.pre_feedforward_layernorm, stream, None)
        stream = stream + self.post_feedforward_layernorm(self.mlp(normed, batch))
        streams = self.altup.correct(predicted, stream)
        if inputs is not None:
            own = self.per_layer(self.altup.for_embedding(streams), inputs)
            streams = [streams[0], *(stream + own for stream in streams[1:])]
        found = torch.cat(streams, dim=-1)
        return found, torch.zeros_like(found)
