"""8-bit weights and 8-bit activations: quantized per token as they come, or by a scale fixed beforehand."""

from __future__ import annotations

from typing import Any

import torch

from llm.base.errors import CheckpointError
from llm.quantization.quantizer import IntegerWeight
from llm.quantization.registry import register_scheme
from llm.quantization.schemes.base import IntegerMethod, one_scale_per_row


@register_scheme("W8A8_DYNAMIC", "embedding")
@register_scheme("W8A8_DYNAMIC", "linear")
class W8A8Dynamic(IntegerMethod):
    """y = (sum_k xq w) * xs * scale + bias with xs = max|x| / 127 of each token."""

    scheme = "W8A8_DYNAMIC"
    pack_op = "pack_int8"
    linear_op = "linear_w8a8_dynamic"
    max_bits = 8

    def check(self, weight: IntegerWeight) -> None:
        super().check(weight)
        one_scale_per_row(weight, self.scheme)

    def _multiply(self, layer: Any, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self._linear(rows, layer.packed_weight, self._row_scale(layer), bias)


@register_scheme("W8A8_MIX", "linear")
class W8A8Mix(W8A8Dynamic):
    """ModelSlim's PDMIX: static on the decoding machines of a split deployment, dynamic anywhere else, so also here."""

    scheme = "W8A8_MIX"


@register_scheme("W8A8", "linear")
class W8A8Static(IntegerMethod):
    """y = (sum_k (xq - offset) w) * input_scale * scale + bias with one activation scale and offset for the layer."""

    scheme = "W8A8"
    pack_op = "pack_int8"
    linear_op = "linear_w8a8_static"
    max_bits = 8

    def check(self, weight: IntegerWeight) -> None:
        super().check(weight)
        one_scale_per_row(weight, self.scheme)
        if weight.input_scale is None or not weight.input_scale > 0:
            raise CheckpointError(f"W8A8 needs a positive input scale, got {weight.input_scale}.")
        if not -128 <= weight.input_offset <= 127:
            raise CheckpointError(f"W8A8 needs an input offset in [-128, 127], got {weight.input_offset}.")

    def _keep(self, weight: IntegerWeight) -> None:
        self.input_scale = weight.input_scale or 0.0
        self.input_offset = weight.input_offset

    def integers(self, layer: Any) -> IntegerWeight:
        weight = super().integers(layer)
        weight.input_scale, weight.input_offset = self.input_scale, self.input_offset
        return weight

    def _multiply(self, layer: Any, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        scale = self._row_scale(layer)
        return self._linear(rows, layer.packed_weight, scale, self.input_scale, self.input_offset, bias)
