"""4-bit weights and 8-bit activations, quantized per token.

The sums of each group are exact integers; groups are added in order. vllm-ascend's linear form of W4A8_DYNAMIC leaves
the activations in 16 bits; ours quantizes them, as the name says and as its mixture-of-experts form does.
"""

from __future__ import annotations

from typing import Any

import torch

from llm.base.errors import CheckpointError
from llm.quantization.quantizer import IntegerWeight
from llm.quantization.registry import register_scheme
from llm.quantization.schemes.base import IntegerMethod


@register_scheme("W4A8_DYNAMIC", "linear")
class W4A8Dynamic(IntegerMethod):
    """y = (sum_g (sum_{k in g} xq w) * scale[g]) * xs + bias; per channel is one group."""

    scheme = "W4A8_DYNAMIC"
    pack_op = "pack_int4"
    linear_op = "linear_w4a8"
    max_bits = 4
    reads_narrow_scales = True

    def check(self, weight: IntegerWeight) -> None:
        super().check(weight)
        if weight.zero is not None:
            raise CheckpointError("W4A8 computes symmetric weights; this layer has zero points.")

    def _multiply(self, layer: Any, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self._linear(rows, layer.packed_weight, layer.weight_scale, self.group_size, bias)
