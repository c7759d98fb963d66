"""What computes the experts of a layer: one call of the operation `experts` with the weights of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from llm.base.construction import construction
from llm.base.custom_op import CustomOp
from llm.kernels.backend import Operations
from llm.kernels.reference.experts import over_experts
from llm.kernels.weight import ExpertWeights
from llm.layers.kernel_op import KernelOp
from llm.quantization.base import FusedMoEMethodBase, WeightLoader

# Token indices -> the context in which an expert computes them.
OfTokens = Callable[[torch.Tensor], AbstractContextManager[None]]


class ExpertLayer(Protocol):
    """What methods read of a layer of experts, which is a `FusedMoE`."""

    hidden_size: int
    activation: str
    swiglu_limit: float

    @property
    def placed_experts(self) -> Sequence[Callable[[torch.Tensor], torch.Tensor]]: ...
    def expert_weights(self) -> ExpertWeights | None: ...
    def of_tokens(self) -> OfTokens | None: ...


class ExpertsMethod(KernelOp, FusedMoEMethodBase):
    """Computes with the weights of the layer's `experts`, which are pairs of linear layers.

    Where those cannot be given to one operation (they are hooked, or an adapter of a token changes them) it calls them
    one by one, with the same bits.
    """

    operations = ("experts",)

    def __init__(self, *, enforce_enable: bool = False) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.invariant = self.backend.computes("experts", "select_experts")
        self.kernel = self.backend.source("experts")
        self._place = construction().weights

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        *,
        weight_loader: WeightLoader,
    ) -> None:
        """Nothing: the linear layers of each expert have made theirs."""

    def apply(self, layer: Any, *inputs: torch.Tensor) -> Any:
        """(layer, x, weights, ids) -> float [N, H]. With a function alone it is the `apply` of nn.Module."""
        return self(layer, *inputs) if inputs else nn.Module.apply(self, layer)

    def compute(
        self, ops: Operations, layer: ExpertLayer, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        return self.sum_of_experts(ops, layer, x, topk_weights, topk_ids)

    def sum_of_experts(
        self, ops: Operations, layer: ExpertLayer, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        of_tokens = layer.of_tokens()
        weights = layer.expert_weights() if of_tokens is None else None
        if weights is None:
            return over_experts(x, topk_ids, topk_weights, layer.placed_experts, layer.hidden_size, of_tokens)
        if self._place.is_slow:
            chosen = topk_ids.unique().tolist()
            self._place.fetch(each.data for index in chosen for each in (weights.gate_up[index], weights.down[index]))
        return ops.experts(x, topk_ids, topk_weights, weights, layer.activation, layer.swiglu_limit)


@CustomOp.register("unquantized_fused_moe")
class UnquantizedFusedMoEMethod(ExpertsMethod):
    """Experts in their storage type (float32, bfloat16, float16)."""
