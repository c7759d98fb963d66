"""The tensors of compressed-tensors checkpoints: int-quantized and naive (a byte per value), and pack-quantized."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from llm.errors import CheckpointError
from llm.quantization.base import WeightLoader
from llm.quantization.packing import packed_words, unpack_from_int32
from llm.quantization.quantizer import IntegerWeight
from llm.quantization.storage.base import (
    POSITIVE,
    Ready,
    WeightStorage,
    check_scales,
    expand_slots,
    order_of_groups,
    whole_offset,
)


class CompressedTensorsStorage(WeightStorage):
    """A weight as `compressed_tensors.compressors` write it.

    Tensors: `weight` int8 [N, K], or `weight_packed` int32 [N, ceil(K * bits / 32)] with `weight_shape`; `weight_scale`
    [1], [N, 1] or [N, G]; `weight_zero_point` when asymmetric, int8 of the scale's shape or packed along N; for static
    activations `input_scale` [1] and, when asymmetric, `input_zero_point` [1].

    Args:
        bits: of each value.
        packed: the format is pack-quantized.
        group_size: columns that share a scale; None: one scale per row.
        per_tensor: one scale per matrix; in a fused layer, one per shard.
        symmetric: there are no zero points.
        static_input: activations have a fixed scale.
        symmetric_input: the activations' fixed scale has no zero point.
        scattered: a group is not a run of columns; `weight_g_idx` [K] says the group of each.
    """

    def __init__(
        self,
        bits: int,
        *,
        packed: bool = False,
        group_size: int | None = None,
        per_tensor: bool = False,
        symmetric: bool = True,
        static_input: bool = False,
        symmetric_input: bool = True,
        scattered: bool = False,
    ) -> None:
        super().__init__()
        self.bits = bits
        self.packed = packed
        self.group_size = group_size
        self.per_tensor = per_tensor
        self.symmetric = symmetric
        self.static_input = static_input
        self.symmetric_input = symmetric_input
        self.scattered = scattered
        self.rotation = 0  # of the weight, as `IntegerWeight` has it

    def create(
        self, layer: nn.Module, sizes: list[int], columns: int, dtype: torch.dtype, loader: WeightLoader, ready: Ready
    ) -> None:
        self._sizes, self._columns = sizes, columns
        self._shard_ids: tuple[Any, ...] = tuple(getattr(layer, "shard_ids", ()))
        rows, slots, groups = sum(sizes), len(sizes), columns // (self.group_size or columns)
        if self.packed:
            data = torch.empty(rows, packed_words(columns, self.bits), dtype=torch.int32)
            self.add(layer, "weight_packed", data, loader, output_dim=0, input_dim=1)
            self.add(layer, "weight_shape", torch.empty(slots, dtype=torch.int64), self._load_shape, any_dtype=True)
        else:
            data = torch.empty(rows, columns, dtype=torch.int8)
            self.add(layer, "weight", data, loader, output_dim=0, input_dim=1)
        shape = (slots,) if self.per_tensor else (rows, groups)
        attributes: dict[str, Any] = {"shard_slots": True} if self.per_tensor else {"output_dim": 0, "input_dim": 1}
        self.add(layer, "weight_scale", torch.empty(shape), loader, POSITIVE, **attributes)
        if not self.symmetric:
            zeros = torch.empty(shape, dtype=torch.int8)
            is_packed = self.packed and not self.per_tensor
            own = self._load_packed_zeros if is_packed else loader
            self.add(layer, "weight_zero_point", zeros, own, any_dtype=True, is_packed=is_packed, **attributes)
        if self.scattered:  # of each shard: those of a fused layer must be equal
            groups_of = torch.empty(slots, columns, dtype=torch.int32)
            self.add(layer, "weight_g_idx", groups_of, self._load_groups, any_dtype=True)
        if self.static_input:
            self.add(layer, "input_scale", torch.empty(slots), loader, POSITIVE, shard_slots=True)
            if not self.symmetric_input:
                zero = torch.empty(slots, dtype=torch.int32)
                self.add(layer, "input_zero_point", zero, loader, shard_slots=True, any_dtype=True)

    def read(self, layer: nn.Module) -> IntegerWeight:
        rows = sum(self._sizes)
        if self.packed:
            q = unpack_from_int32(self.take(layer, "weight_packed"), self.bits, (rows, self._columns))
        else:
            q = self.take(layer, "weight")
            self._check_range(q)
        scale = self._per_row(self.take(layer, "weight_scale"))
        weight = IntegerWeight(q, scale, self.group_size or self._columns, self.bits, rotation=self.rotation)
        if not self.symmetric:
            weight.zero = self._per_row(self.take(layer, "weight_zero_point"))
        if self.scattered:
            order = order_of_groups(self.take(layer, "weight_g_idx"), weight.group_size, "weight_g_idx")
            if order is not None:
                weight.q = q[:, order]
                weight.columns = order.int()
        if self.static_input:
            self._read_input(layer, weight)
        return weight

    def _per_row(self, values: torch.Tensor) -> torch.Tensor:
        return expand_slots(values, self._sizes)[:, None] if self.per_tensor else values

    def _check_range(self, q: torch.Tensor) -> None:
        low, high = -(1 << (self.bits - 1)), (1 << (self.bits - 1)) - 1
        if q.numel() and (q.min() < low or q.max() > high):
            raise CheckpointError(f"the weight has values outside of {self.bits} bits, [{low}, {high}].")

    def _read_input(self, layer: nn.Module, weight: IntegerWeight) -> None:
        """Shards of a fused layer have the same activations: take the union of their ranges."""
        scale = self.take(layer, "input_scale")
        if self.symmetric_input:
            weight.input_scale = float(scale.max())
            return
        zero = self.take(layer, "input_zero_point").float()
        if torch.equal(scale, scale[:1].expand_as(scale)) and torch.equal(zero, zero[:1].expand_as(zero)):
            weight.input_scale = float(scale[0])
            weight.input_offset = whole_offset(float(zero[0]), "input_zero_point")
            return
        low, high = float((scale * (-128 - zero)).min()), float((scale * (127 - zero)).max())
        joined = torch.tensor((high - low) / 255, dtype=torch.float32)
        check_scales(joined, "the range of input_scale and input_zero_point", POSITIVE)
        weight.input_scale = float(joined)
        weight.input_offset = whole_offset(round(-128 - low / weight.input_scale), "input_zero_point")

    def _load_shape(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: Any = None) -> int:
        rows = sum(self._sizes) if shard_id is None else self._sizes[self._shard_ids.index(shard_id)]
        if loaded.tolist() != [rows, self._columns]:
            raise ValueError(f"says {loaded.tolist()}, the model needs {[rows, self._columns]}")
        return param.numel() if shard_id is None else 1

    def _load_groups(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: object = None) -> int:
        if list(loaded.shape) != [self._columns]:
            raise ValueError(f"has shape {list(loaded.shape)}, the model needs {[self._columns]}")
        target = param.data if shard_id is None else param.data[self._shard_ids.index(shard_id)]
        target[:] = loaded
        return target.numel()

    def _load_packed_zeros(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: Any = None) -> int:
        index = 0 if shard_id is None else self._shard_ids.index(shard_id)
        start = 0 if shard_id is None else sum(self._sizes[:index])
        rows = sum(self._sizes) if shard_id is None else self._sizes[index]
        expected = [packed_words(rows, self.bits), param.shape[1]]
        if list(loaded.shape) != expected or loaded.dtype != torch.int32:
            raise ValueError(f"is {loaded.dtype} {list(loaded.shape)}, the model needs int32 {expected}")
        zeros = unpack_from_int32(loaded, self.bits, (rows, param.shape[1]), dim=0)
        param.data[start : start + rows] = zeros
        return zeros.numel()
