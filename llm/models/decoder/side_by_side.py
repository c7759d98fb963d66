"""Attention and a recurrence beside each other in one layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from llm.forward import ForwardBatch
from llm.models.decoder.layer import DecoderLayer, LayerConfig, Norms, PreNormLayer, Stream, add_norm
from llm.models.decoder.part import BuildContext, NormConfig, PartConfig


@dataclass(frozen=True, kw_only=True)
class SideBySide(LayerConfig):
    """A layer with a recurrence beside its attention."""

    mamba: PartConfig

    @property
    def parts(self) -> Mapping[str, PartConfig]:
        return {"mamba": self.mamba, **super().parts}


@dataclass(frozen=True)
class ScaledSums(Norms):
    """x + mamba(norm(x)) + attention(norm(x)), each with constants on what goes in and comes out; then the MLP."""

    norm: NormConfig
    mamba: tuple[float, float]
    attention: tuple[float, float]

    def build(self, layer: LayerConfig, context: BuildContext, prefix: str) -> DecoderLayer:
        return SideBySideLayer(layer, self, context, prefix)


class SideBySideLayer(PreNormLayer):
    mamba: nn.Module

    def __init__(self, layer: LayerConfig, norms: ScaledSums, context: BuildContext, prefix: str) -> None:
        super().__init__(layer, norms.norm, context, prefix)
        self.norms = norms

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch) -> Stream:
        hidden, residual = add_norm(self.input_layernorm, hidden, residual)
        (first, last), (before, after) = self.norms.mamba, self.norms.attention
        states = self.mamba(hidden * first, batch) * last
        hidden = states + getattr(self, self.mixer_name)(hidden * before, batch) * after
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden, batch), residual
