"""Integer weights under activations that stay float: W8A16 and W4A16, per channel or group, symmetric or not."""

from __future__ import annotations

from typing import Any

import torch

from llm.quantization.registry import register_scheme
from llm.quantization.schemes.base import IntegerMethod


@register_scheme("W8A16", "embedding")
@register_scheme("W8A16", "linear")
class W8A16(IntegerMethod):
    """y = x W^T + bias with W = (q - zero) * scale; the 16 stands for the activations' own type, float32 on a CPU."""

    scheme = "W8A16"
    pack_op = "pack_int8"
    linear_op = "linear_w8a16"
    max_bits = 8
    reads_narrow_scales = True

    def _multiply(self, layer: Any, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        packed, scale, zero = layer.packed_weight, layer.weight_scale, layer.weight_zero
        return self._linear(rows, packed, scale, zero, self.group_size, bias)


@register_scheme("W4A16", "linear")
class W4A16(W8A16):
    """The same with two weights in a byte."""

    scheme = "W4A16"
    pack_op = "pack_int4"
    linear_op = "linear_w4a16"
    max_bits = 4
