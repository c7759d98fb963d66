"""Recurrent mixers in the place of attention: the configs that build the layers of `llm.layers.mamba` and others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from llm.errors import UnsupportedModelError
from llm.forward import RecurrentSpec
from llm.layers.linear_attention.gated_delta_net import (
    DeltaHeads,
    GatedDeltaNetAttention,
    KimiGatedDeltaNetAttention,
    OlmoHybridGatedDeltaNetAttention,
    QwenGatedDeltaNetAttention,
    QwenNextGatedDeltaNetAttention,
)
from llm.layers.mamba.short_conv import ShortConv
from llm.layers.parallel import TensorParallel
from llm.models.config_reader import ConfigReader
from llm.models.decoder.part import BuildContext, PartConfig


@dataclass(frozen=True)
class ShortConvConfig(PartConfig):
    """A gated convolution over the last `kernel_size` tokens; as many channels as the hidden state."""

    channels: int
    kernel_size: int
    bias: bool = False

    def build(self, context: BuildContext, prefix: str) -> nn.Module:
        return ShortConv(
            self.channels,
            self.kernel_size,
            bias=self.bias,
            layer_index=context.next_state(),
            prefix=prefix,
            **context.common,
        )

    def states(self, dtype: torch.dtype, tp: TensorParallel) -> tuple[RecurrentSpec, ...]:
        return (RecurrentSpec(((self.kernel_size - 1, self.channels // tp.size),), (torch.float32,), rolls_back=True),)


_DELTA_NETS: dict[str, type[GatedDeltaNetAttention]] = {
    "qwen": QwenGatedDeltaNetAttention,
    "qwen_next": QwenNextGatedDeltaNetAttention,
    "olmo_hybrid": OlmoHybridGatedDeltaNetAttention,
    "kimi": KimiGatedDeltaNetAttention,
}


@dataclass(frozen=True)
class GatedDeltaConfig(PartConfig):
    """Linear attention by the gated delta rule.

    Attributes:
        kind: whose projections: "qwen", "qwen_next", "olmo_hybrid" or "kimi".
        eps: of the norm of a head's output.
        beta_scale: 2 allows negative eigenvalues.
        activation: of the output's gate, "silu" or "sigmoid".
    """

    kind: str
    heads: DeltaHeads
    kernel_size: int
    eps: float
    beta_scale: float = 1.0
    activation: str = "silu"

    def __post_init__(self) -> None:
        if self.heads.heads % self.heads.key_heads:
            raise UnsupportedModelError(
                f"config.json: linear_num_value_heads {self.heads.heads} is not a multiple of linear_num_key_heads "
                f"{self.heads.key_heads}."
            )

    def build(self, context: BuildContext, prefix: str) -> nn.Module:
        return _DELTA_NETS[self.kind](
            context.hidden_size,
            self.heads,
            self.kernel_size,
            self.eps,
            layer_index=context.next_state(),
            beta_scale=self.beta_scale,
            activation=self.activation,
            prefix=prefix,
            **context.common,
        )

    def states(self, dtype: torch.dtype, tp: TensorParallel) -> tuple[RecurrentSpec, ...]:
        heads = self.heads
        window = self.kernel_size - 1, (2 * heads.keys + heads.values) // tp.size
        matrices = heads.heads // tp.size, heads.key_size, heads.value_size
        return (RecurrentSpec((window, matrices), (torch.float32, torch.float32), rolls_back=True),)


def attending_layers(reader: ConfigReader, count: int, default: list[bool] | None = None) -> list[bool]:
    """Which layers have full attention: by `layer_types`, or `default`, or every `full_attention_interval`-th."""
    every = reader.positive("full_attention_interval", 4)
    kinds = reader.names("layer_types")
    if kinds is None:
        return default or [(index + 1) % every == 0 for index in range(count)]
    if len(kinds) != count or set(kinds) - {"full_attention", "linear_attention"}:
        raise reader.error("layer_types", kinds, f"{count} of 'full_attention' or 'linear_attention'")
    return [kind == "full_attention" for kind in kinds]
