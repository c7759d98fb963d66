"""Recurrent mixers in the place of attention: the configs that build the layers of `llm.layers.mamba` and others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from llm.forward import RecurrentSpec
from llm.layers.mamba.short_conv import ShortConv
from llm.layers.parallel import TensorParallel
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
        return (RecurrentSpec(((self.kernel_size - 1, self.channels // tp.size),), (torch.float32,)),)
