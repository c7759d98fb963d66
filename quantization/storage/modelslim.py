"""The tensors of ModelSlim checkpoints (vllm-ascend): static W8A8, int8 with one scale per row, and both int4 layouts.

Stored offsets follow q = round(x / s + offset), so a value is (q - offset) * s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from llm.errors import CheckpointError
from llm.kernels.weight import dequantize
from llm.quantization.base import WeightLoader
from llm.quantization.packing import unpack_deq_scale, unpack_row_pairs
from llm.quantization.quantizer import IntegerWeight
from llm.quantization.storage.base import (
    NOT_NEGATIVE,
    POSITIVE,
    Ready,
    WeightStorage,
    check_scales,
    checked,
    same_in_all_slots,
    whole_offset,
)

# Relative tolerance for scales that were rounded to float16 (11 bits), with room for the rounding of their product.
_SCALE_TOLERANCE = 4e-3
_SCALE_BIAS_TOLERANCE = 1e-3


class _RowStorage(WeightStorage):
    """Common base of the layouts: adds row-wise parameters."""

    def _add_rows(
        self, layer: nn.Module, name: str, data: torch.Tensor, loader: WeightLoader, scales: str = "", /, **more: Any
    ) -> None:
        self.add(layer, name, data, loader, scales, output_dim=0, **more)

    def _offsets(self, layer: nn.Module, name: str) -> torch.Tensor | None:
        """Zero points; None if they are absent or all 0."""
        values = self.take(layer, name)
        if not self.was_loaded(layer, name) or not values.any():
            return None
        if not torch.equal(values, values.round()):
            raise CheckpointError(f"{name} has values that are not whole.")
        return values


class PerRowInt8(_RowStorage):
    """W8A8_DYNAMIC, W8A8_MIX and W8A16: `weight` int8 [N, K], `weight_scale` and `weight_offset` [N, 1]."""

    def create(
        self, layer: nn.Module, sizes: list[int], columns: int, dtype: torch.dtype, loader: WeightLoader, ready: Ready
    ) -> None:
        rows = sum(sizes)
        self._columns = columns
        self._add_rows(layer, "weight", torch.empty(rows, columns, dtype=torch.int8), loader, input_dim=1)
        self._add_rows(layer, "weight_scale", torch.empty(rows, 1), loader, POSITIVE)
        self._add_rows(layer, "weight_offset", torch.zeros(rows, 1), loader, optional=True, any_dtype=True)

    def read(self, layer: nn.Module) -> IntegerWeight:
        scale = self.take(layer, "weight_scale")
        q = self.take(layer, "weight")
        return IntegerWeight(q, scale, self._columns, 8, zero=self._offsets(layer, "weight_offset"))


class StaticInt8(_RowStorage):
    """W8A8: one activation scale and offset; y = (sum_k xq w + quant_bias) * deq_scale.

    deq_scale = input_scale * weight_scale; quant_bias = bias / deq_scale - input_offset * sum_k w, rounded: it includes
    the layer's bias. Activations are round(x / scale) + offset; vllm-ascend rounds x * (1 / scale) + offset, which
    differs only for values next to the border between two integers.

    Tensors: `weight` int8 [N, K], `input_scale`, `input_offset` [1], `quant_bias` int32 [N], `deq_scale` [N] as float32
    or as int64 with its bits, `weight_scale`, `weight_offset` [N, 1].
    """

    holds_bias = True

    def create(
        self, layer: nn.Module, sizes: list[int], columns: int, dtype: torch.dtype, loader: WeightLoader, ready: Ready
    ) -> None:
        rows, slots = sum(sizes), len(sizes)
        self._columns = columns
        self._add_rows(layer, "weight", torch.empty(rows, columns, dtype=torch.int8), loader, input_dim=1)
        self.add(layer, "input_scale", torch.empty(slots), loader, POSITIVE, shard_slots=True)
        self.add(layer, "input_offset", torch.empty(slots), loader, shard_slots=True, any_dtype=True)
        self._add_rows(layer, "quant_bias", torch.zeros(rows, dtype=torch.int32), loader, optional=True)
        bits = converted(checked(loader, POSITIVE), unpack_deq_scale)
        self._add_rows(layer, "deq_scale", torch.empty(rows), bits, optional=True, any_dtype=True)
        self._add_rows(layer, "weight_scale", torch.empty(rows, 1), loader, POSITIVE, optional=True)
        self._add_rows(layer, "weight_offset", torch.zeros(rows, 1), loader, optional=True, any_dtype=True)

    def read(self, layer: nn.Module) -> IntegerWeight:
        input_scale = same_in_all_slots(self.take(layer, "input_scale"), "input_scale")
        offset = whole_offset(same_in_all_slots(self.take(layer, "input_offset"), "input_offset"), "input_offset")
        if self._offsets(layer, "weight_offset") is not None:
            raise CheckpointError("weight_offset is not 0; W8A8 computes symmetric weights.")
        q, scale = self.take(layer, "weight"), self._output_scale(layer, input_scale)
        by_row = (scale / input_scale).float()[:, None]
        check_scales(by_row, "deq_scale divided by input_scale", POSITIVE)
        weight = IntegerWeight(q, by_row, self._columns, 8)
        weight.input_scale, weight.input_offset = input_scale, offset
        if self.was_loaded(layer, "quant_bias"):
            # The kernel subtracts offset * sum_k w itself: add it back to get the float bias.
            sums = q.sum(dim=1, dtype=torch.int64)
            weight.bias = ((self.take(layer, "quant_bias").long() + offset * sums).double() * scale).float()
        elif getattr(layer, "bias", None) is not None and not getattr(layer.bias, "elements_loaded", 0):
            raise CheckpointError("neither quant_bias nor bias is in the checkpoint, and the layer has one.")
        return weight

    def _output_scale(self, layer: nn.Module, input_scale: float) -> torch.Tensor:
        """deq_scale in float64, from the checkpoint or from its factors; if it has both, they must agree."""
        by_factors = None
        if self.was_loaded(layer, "weight_scale"):
            by_factors = self.take(layer, "weight_scale")[:, 0].double() * input_scale
        if not self.was_loaded(layer, "deq_scale"):
            if by_factors is None:
                raise CheckpointError("neither deq_scale nor weight_scale is in the checkpoint.")
            return by_factors
        scale = self.take(layer, "deq_scale").double()
        if by_factors is not None and not torch.allclose(scale, by_factors, rtol=_SCALE_TOLERANCE, atol=0):
            raise CheckpointError("deq_scale is not input_scale * weight_scale.")
        return scale


class TwoLevelInt4(_RowStorage):
    """W4A8_DYNAMIC: w = q4 * weight_scale_second[n, g] * weight_scale[n]; per channel without second-level scales.

    Args:
        group_size: of the second-level scales; None: per channel.
        packed: version 1.0.0, `weight` int8 [N / 2, K] with two rows in a byte; else int8 [N, K], one value per byte.

    `scale_bias` ([N, 1] or [N, 16], packed only) is 8 * sum_k w for an NPU kernel; here it verifies the loaded weight.
    """

    def __init__(self, group_size: int | None, packed: bool) -> None:
        super().__init__()
        self.group_size = group_size
        self.packed = packed

    def create(
        self, layer: nn.Module, sizes: list[int], columns: int, dtype: torch.dtype, loader: WeightLoader, ready: Ready
    ) -> None:
        rows = sum(sizes)
        self._columns = columns
        if self.packed and any(size % 2 for size in sizes):
            raise CheckpointError(f"int4 weights in row pairs need an even number of rows, got {sizes}.")
        stored = rows // 2 if self.packed else rows
        pairs: dict[str, Any] = {"packed_dim": 0, "packed_factor": 2} if self.packed else {}
        data = torch.empty(stored, columns, dtype=torch.int8)
        self._add_rows(layer, "weight", data, loader, input_dim=1, **pairs)
        self._add_rows(layer, "weight_scale", torch.empty(rows, 1), loader, POSITIVE)
        self._add_rows(layer, "weight_offset", torch.zeros(rows, 1), loader, optional=True, any_dtype=True)
        if self.packed:
            total = converted(loader, _row_sums)
            self._add_rows(layer, "scale_bias", torch.empty(rows), total, optional=True, any_dtype=True)
        if self.group_size is not None:
            shape = (rows, columns // self.group_size)
            zeros = torch.zeros(shape)
            self._add_rows(layer, "weight_scale_second", torch.empty(shape), loader, POSITIVE, input_dim=1)
            self._add_rows(layer, "weight_offset_second", zeros, loader, input_dim=1, optional=True, any_dtype=True)

    def read(self, layer: nn.Module) -> IntegerWeight:
        stored = self.take(layer, "weight")
        q = unpack_row_pairs(stored) if self.packed else stored
        scale = self.take(layer, "weight_scale")
        offsets = ["weight_offset"]
        if self.group_size is not None:
            second = self.take(layer, "weight_scale_second")
            scale = scale * second
            check_scales(scale, "weight_scale times weight_scale_second", NOT_NEGATIVE)
            offsets.append("weight_offset_second")
        for name in offsets:
            if self._offsets(layer, name) is not None:
                raise CheckpointError(f"{name} is not 0; W4A8 computes symmetric weights.")
        weight = IntegerWeight(q, scale, self.group_size or self._columns, 4)
        if self.packed and self.was_loaded(layer, "scale_bias"):
            self._check_scale_bias(self.take(layer, "scale_bias"), weight)
        return weight

    def _check_scale_bias(self, scale_bias: torch.Tensor, weight: IntegerWeight) -> None:
        values = dequantize(weight.q, weight.scale, None, weight.group_size).double()
        allowed = _SCALE_BIAS_TOLERANCE * 8 * values.abs().sum(dim=1)
        wrong = ~((scale_bias.double() - 8 * values.sum(dim=1)).abs() <= allowed)  # NaN is wrong
        if wrong.any():
            raise CheckpointError(
                f"scale_bias is not 8 times the sum of the weights in {int(wrong.sum())} of {len(wrong)} rows; the "
                "weights were packed or scaled in another way than the description says."
            )


def _row_sums(partial: torch.Tensor) -> torch.Tensor:
    if partial.dim() != 2:
        raise ValueError(f"has shape {list(partial.shape)}, must have two dimensions")
    return partial.double().sum(dim=1).float()


def converted(loader: WeightLoader, convert: Callable[[torch.Tensor], torch.Tensor]) -> WeightLoader:
    """`loader`, called with `convert(loaded)`."""

    def load(param: nn.Parameter, loaded: torch.Tensor, shard_id: Any = None) -> int:
        return loader(param, convert(loaded), shard_id)

    return load
