"""MLPs: gated and plain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from llm.base.text import show
from llm.base.watch import Patchable
from llm.errors import UnsupportedModelError
from llm.forward import ForwardBatch
from llm.layers.activation import GATED_ACTIVATIONS, PLAIN_ACTIVATIONS, GeluAndMulSparse
from llm.layers.linear import ColumnFactors, ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from llm.models.decoder.part import BuildContext, PartConfig


@dataclass(frozen=True)
class GatedMLPConfig(PartConfig):
    """down(act(gate(x)) * up(x)); `activation` is a key of `GATED_ACTIVATIONS`, `bias`: all three have one.

    `gate_multiplier` and `down_multiplier` are constants that multiply gate(x) and the result. `sparsity` is the share
    of the gate that is zero, with gelu_pytorch_tanh.
    """

    intermediate_size: int
    activation: str = "silu"
    bias: bool = False
    gate_multiplier: float = 1.0
    down_multiplier: float = 1.0
    sparsity: float = 0.0

    def __post_init__(self) -> None:
        _check_activation(self.activation, GATED_ACTIVATIONS)

    def build(self, context: BuildContext, prefix: str) -> nn.Module:
        return GatedMLP(self, context, prefix)


@dataclass(frozen=True)
class PlainMLPConfig(PartConfig):
    """down(act(up(x))); `activation` is a key of `PLAIN_ACTIVATIONS`, `bias`: both have one."""

    intermediate_size: int
    activation: str
    bias: bool = False

    def __post_init__(self) -> None:
        _check_activation(self.activation, PLAIN_ACTIVATIONS)

    def build(self, context: BuildContext, prefix: str) -> nn.Module:
        return PlainMLP(self, context, prefix)


class GatedMLP(Patchable):
    def __init__(self, config: GatedMLPConfig, context: BuildContext, prefix: str) -> None:
        super().__init__()
        hidden, inner = context.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden,
            [inner, inner],
            bias=config.bias,
            prefix=f"{prefix}.gate_up_proj",
            **context.linear,
        )
        self.down_proj = RowParallelLinear(
            inner, hidden, bias=config.bias, prefix=f"{prefix}.down_proj", **context.linear
        )
        self.act_fn = (
            GeluAndMulSparse(config.sparsity, "tanh") if config.sparsity else GATED_ACTIVATIONS[config.activation]()
        )
        gate, up = self.gate_up_proj.output_partition_sizes
        factors = [(gate, config.gate_multiplier), (up, 1.0)]
        self.factors = None if config.gate_multiplier == 1.0 else ColumnFactors(factors)
        self.multiplier = config.down_multiplier

    def forward(self, hidden: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        both = self.gate_up_proj(hidden)
        y = self.down_proj(self.act_fn(both if self.factors is None else self.factors(both)))
        return y if self.multiplier == 1.0 else y * self.multiplier


class PlainMLP(Patchable):
    def __init__(self, config: PlainMLPConfig, context: BuildContext, prefix: str) -> None:
        super().__init__()
        hidden, inner = context.hidden_size, config.intermediate_size
        self.up_proj = ColumnParallelLinear(
            hidden, inner, bias=config.bias, prefix=f"{prefix}.up_proj", **context.linear
        )
        self.down_proj = RowParallelLinear(
            inner, hidden, bias=config.bias, prefix=f"{prefix}.down_proj", **context.linear
        )
        self.act_fn = PLAIN_ACTIVATIONS[config.activation]()

    def forward(self, hidden: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.up_proj(hidden)))


def _check_activation(name: str, known: Mapping[str, object]) -> None:
    if name not in known:
        raise UnsupportedModelError(
            f"config.json: hidden_act (or activation_function) {show(name)} is not supported; known: "
            f"{', '.join(known)}."
        )
