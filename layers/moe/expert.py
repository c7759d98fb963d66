"""One expert as a pair of linear layers, and the weights of all experts as one value for one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypedDict, cast

import torch
from torch import nn

from llm.base.watch import Patchable
from llm.kernels.reference.activation import SWIGLUOAI_ALPHA
from llm.kernels.weight import ExpertWeights, Weight
from llm.layers.activation import GeluAndMul, ReLUSquaredActivation, SiluAndMul, SiluAndMulWithClamp
from llm.layers.linear import ColumnParallelLinear, LinearBase, MergedColumnParallelLinear, RowParallelLinear
from llm.layers.parallel import TensorParallel
from llm.quantization.base import PackedLinearMethod, QuantizationConfig

# As the operation `experts` names them; "swigluoai" has a limit.
ACTIVATIONS: dict[str, Callable[[float], nn.Module]] = {
    "silu": lambda limit: SiluAndMul(),
    "gelu": lambda limit: GeluAndMul(),
    "gelu_tanh": lambda limit: GeluAndMul("tanh"),
    "swigluoai": lambda limit: SiluAndMulWithClamp(limit, alpha=SWIGLUOAI_ALPHA, beta=1.0),
    "relu2_no_mul": lambda limit: ReLUSquaredActivation(),
}
# Whether there is a gate -> the name of the linear layer that reads what goes in.
FIRST_LAYER = {True: "gate_up_proj", False: "up_proj"}


class _LayerArguments(TypedDict):
    params_dtype: torch.dtype | None
    quant_config: QuantizationConfig | None
    tp: TensorParallel


class Expert(Patchable):
    """One expert: down(act(gate(x)) * up(x)), of which a rank has its part of the channels between.

    Names, shards and quantization are those of any linear layer. Called only where the operation `experts` is not.

    Args:
        is_gated: False: down(act(up(x))).
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        act_fn: nn.Module,
        *,
        is_gated: bool = True,
        bias: bool,
        params_dtype: torch.dtype | None,
        quant_config: QuantizationConfig | None,
        prefix: str,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        types: _LayerArguments = {"params_dtype": params_dtype, "quant_config": quant_config, "tp": tp}
        self._first = FIRST_LAYER[is_gated]
        path, inner = f"{prefix}.{self._first}", intermediate_size
        if is_gated:
            self.gate_up_proj = MergedColumnParallelLinear(
                hidden_size, [inner, inner], bias, prefix=path, return_bias=False, **types
            )
        else:
            self.up_proj = ColumnParallelLinear(hidden_size, inner, bias, prefix=path, return_bias=False, **types)
        self.down_proj = RowParallelLinear(
            intermediate_size,
            hidden_size,
            bias,
            reduce_results=False,
            prefix=f"{prefix}.down_proj",
            return_bias=False,
            **types,
        )
        self._act_fn = [act_fn]  # no child: the operation `experts` computes it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self._act_fn[0](getattr(self, self._first)(x)))


def weights_of(experts: Sequence[Expert], name: str, adds_bias: bool) -> tuple[Weight | None, ...]:
    """What the experts' layers of this name multiply with.

    Asked of thousands of layers in a step: `_modules` is read where `getattr` takes four times as long.
    """
    return tuple([_weight_of(cast(LinearBase, expert._modules[name]), adds_bias) for expert in experts])


def _weight_of(layer: LinearBase, adds_bias: bool) -> Weight | None:
    """None: only the layer's method knows, or somebody patched it. `isinstance` would ask an ABC, which is slow."""
    weight, method = layer.packed_weight, layer.quant_method
    if weight is None or type(method).apply is not PackedLinearMethod.apply or "apply" in method.__dict__:
        return None
    bias = layer.bias if adds_bias else None
    return weight if weight.bias is bias else cast(PackedLinearMethod, method).weight_with(layer, bias)


def together(gate_up: Sequence[Weight | None], down: Sequence[Weight | None]) -> ExpertWeights | None:
    """None where only the layers' methods know some of them. Patterns may quantize some in another way than others."""
    first, last = tuple(filter(None, gate_up)), tuple(filter(None, down))
    return ExpertWeights(first, last) if len(first) == len(gate_up) and len(last) == len(down) else None
