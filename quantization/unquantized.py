"""Weights as the checkpoint stores them (float32, bfloat16, float16), computed in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from llm.kernels.reference.linear import embedding, linear
from llm.quantization.base import EmbeddingMethodBase, LinearMethodBase, WeightLoader


class UnquantizedLinearMethod(LinearMethodBase):
    """One parameter `weight` [N, K] in its storage type."""

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        *,
        weight_loader: WeightLoader,
    ) -> None:
        data = torch.empty(sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype)
        layer.weight = new_parameter(data, weight_loader, output_dim=0, input_dim=1)

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(x, stored_weight(layer), bias)

    def dequantize_weight(self, layer: nn.Module) -> torch.Tensor:
        return stored_weight(layer).detach().float()


class UnquantizedEmbeddingMethod(UnquantizedLinearMethod, EmbeddingMethodBase):
    """The same table, also read by id."""

    def embedding(self, layer: nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
        return embedding(token_ids, stored_weight(layer), torch.float32)


def new_parameter(data: torch.Tensor, weight_loader: WeightLoader, **attributes: Any) -> nn.Parameter:
    """An inference parameter that carries its loader and its sharding attributes."""
    param = nn.Parameter(data, requires_grad=False)
    param.weight_loader = weight_loader  # type: ignore[attr-defined]
    for name, value in attributes.items():
        setattr(param, name, value)
    return param


def stored_weight(layer: nn.Module) -> torch.Tensor:
    """`layer.weight`; a module's attributes have no static type."""
    weight: Any = layer.weight
    return weight
