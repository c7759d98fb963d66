"""Weights as int8 with one scale per row, made while a float checkpoint is loaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from llm.quantization.base import LinearMethodBase, QuantizationConfig, QuantizeMethodBase
from llm.quantization.registry import register_quantization_config
from llm.quantization.unquantized import new_parameter


@register_quantization_config("acme_int8")
class AcmeInt8Config(QuantizationConfig):
    def get_name(self) -> str:
        return "acme_int8"

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        return AcmeInt8Linear() if layer.quant_kind == "linear" else None


class AcmeInt8Linear(LinearMethodBase):
    scheme = "ACME_INT8"
    reason = "every linear layer"

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        *,
        weight_loader: Any,
    ) -> None:
        data = torch.empty(sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype)
        layer.weight = new_parameter(data, weight_loader, output_dim=0, input_dim=1)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        weight = layer.weight.float()
        scale = weight.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
        layer.scale = nn.Parameter(scale, requires_grad=False)
        layer.weight = nn.Parameter((weight / scale).round().to(torch.int8), requires_grad=False)

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return nn.functional.linear(x, layer.weight * layer.scale, bias)
