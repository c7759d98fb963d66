"""Weights of 8-bit and 4-bit floats, as several formats store them: the codes, and scales of a tensor, of rows, of
groups of columns or of blocks.
"""

from __future__ import annotations

import torch
from torch import nn

from llm.errors import CheckpointError, UnsupportedModelError
from llm.kernels.weight import has_nan_codes
from llm.quantization.base import WeightLoader
from llm.quantization.packing import unpack_fp4
from llm.quantization.quantizer import IntegerWeight
from llm.quantization.storage.base import (
    NOT_NEGATIVE,
    POSITIVE,
    Ready,
    WeightStorage,
    check_scales,
    expand_slots,
    scale_values,
)
from llm.quantization.tables import doubled_fp4

_FP4_GROUPS = {torch.uint8: 32, torch.float8_e4m3fn: 16}


class Float8Storage(WeightStorage):
    """A weight of float8_e4m3fn, `weight` [N, K], that is multiplied by `weight_scale`.

    Args:
        block: rows and columns that share a scale; None: one scale per matrix, in a fused layer one per shard. 0
            columns: all of a row.
        scale_names: the names that a checkpoint may give the scales; each has one of them.
    """

    def __init__(self, block: tuple[int, int] | None, scale_names: tuple[str, ...] = ("weight_scale",)) -> None:
        super().__init__()
        self.block = block
        self.scale_names = scale_names

    def create(
        self, layer: nn.Module, sizes: list[int], columns: int, dtype: torch.dtype, loader: WeightLoader, ready: Ready
    ) -> None:
        self._sizes, self._columns, self._loader = sizes, columns, loader
        self._shard_ids: tuple[object, ...] = tuple(getattr(layer, "shard_ids", ()))
        # Of the whole model: blocks are counted from a matrix's first row, whatever rows this rank has.
        self._stored_sizes: list[int] = list(getattr(layer, "output_sizes", sizes))
        self._stored_columns: int = getattr(layer, "input_size", columns)
        rows = sum(sizes)
        data = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
        self.add(layer, "weight", data, self._load_codes, output_dim=0, input_dim=1)
        optional = len(self.scale_names) > 1
        for name in self.scale_names:
            if self.block is None:
                slots = torch.empty(len(sizes))
                self.add(layer, name, slots, loader, NOT_NEGATIVE, shard_slots=True, optional=optional)
                continue
            scale = torch.empty(rows, -(-columns // self.group_size))
            dims = {"output_dim": 0, "input_dim": 1, "optional": optional}
            self.add(layer, name, scale, self._load_scale, NOT_NEGATIVE, any_dtype=True, **dims)
        self._check_blocks(layer)

    @property
    def group_size(self) -> int:
        """Columns that share a scale."""
        return (self.block[1] if self.block else 0) or self._columns

    def read(self, layer: nn.Module) -> IntegerWeight:
        given = [name for name in self.scale_names if len(self.scale_names) == 1 or self.was_loaded(layer, name)]
        if len(given) != 1:
            raise CheckpointError(f"the weight needs one of the scales {' and '.join(self.scale_names)}, got {given}.")
        scale = self.take(layer, given[0])
        if self.block is None:
            scale = expand_slots(scale, self._sizes)[:, None]
        return IntegerWeight(self.take(layer, "weight"), scale.float(), self.group_size, 8)

    def _check_blocks(self, layer: nn.Module) -> None:
        """Refuse layers whose rows or columns a block does not follow."""
        if self.block is None:
            return
        if self._columns < self._stored_columns and self._columns % self.group_size:
            raise UnsupportedModelError(
                f"a rank has {self._columns} columns, which end within a block of {self.group_size}; use fewer ranks."
            )
        if self.block[0] > 1 and getattr(layer, "stored_by_key_head", False):
            raise UnsupportedModelError("scales of blocks do not follow rows that are stored by key head.")

    def _load_codes(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: object = None) -> int:
        """Checked here and not where the layer is packed alone, so that the error names the checkpoint's tensor."""
        if loaded.dtype == param.dtype and has_nan_codes(loaded):
            raise ValueError("has values that are NaN")
        return self._loader(param, loaded, shard_id)

    def _load_scale(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: object = None) -> int:
        """Scales of blocks become scales of rows."""
        height = self.block[0] if self.block else 1
        index = None if shard_id is None else self._shard_ids.index(shard_id)
        rows = sum(self._stored_sizes) if index is None else self._stored_sizes[index]
        groups = -(-self._stored_columns // (self.block[1] or self._stored_columns)) if self.block else 1
        expected = [-(-rows // height), groups]
        if loaded.dim() == 1 and groups == 1:
            loaded = loaded[:, None]
        if list(loaded.shape) != expected:
            raise ValueError(f"has shape {list(loaded.shape)}, the model needs {expected}")
        scales = scale_values(loaded).repeat_interleave(height, dim=0)[:rows]
        return self._loader(param, scales, shard_id)


class Float4Storage(WeightStorage):
    """A weight of 4-bit floats (e2m1), two in a byte: `weight_packed` uint8 [N, K / 2], the even column's in the low
    nibble.

    `weight_scale` [N, K / group]. MXFP4 has powers of two for 32 columns, NVFP4 float8_e4m3fn for 16, divided by the
    matrix's `weight_global_scale`.

    Args:
        scale_dtype: torch.uint8 of MXFP4, torch.float8_e4m3fn of NVFP4.
        weight_name: another name of `weight_packed`.
    """

    def __init__(self, scale_dtype: torch.dtype, weight_name: str = "weight_packed") -> None:
        super().__init__()
        self.scale_dtype, self.weight_name = scale_dtype, weight_name
        self.group_size = _FP4_GROUPS[scale_dtype]

    def create(
        self, layer: nn.Module, sizes: list[int], columns: int, dtype: torch.dtype, loader: WeightLoader, ready: Ready
    ) -> None:
        if columns % self.group_size:
            raise UnsupportedModelError(f"groups of {self.group_size} do not divide {columns} columns.")
        self._sizes = sizes
        rows, dims = sum(sizes), {"output_dim": 0, "input_dim": 1}
        self.add(layer, self.weight_name, torch.empty(rows, columns // 2, dtype=torch.uint8), loader, **dims)
        scale = torch.empty(rows, columns // self.group_size, dtype=self.scale_dtype)
        self.add(layer, "weight_scale", scale, loader, NOT_NEGATIVE, **dims)
        if self.scale_dtype != torch.uint8:
            divisor = torch.empty(len(sizes))
            self.add(layer, "weight_global_scale", divisor, loader, POSITIVE, shard_slots=True)

    def read(self, layer: nn.Module) -> IntegerWeight:
        codes = unpack_fp4(self.take(layer, self.weight_name))
        scale = scale_values(self.take(layer, "weight_scale"))
        if self.scale_dtype != torch.uint8:
            divisor = self.take(layer, "weight_global_scale")
            scale = scale / expand_slots(divisor, self._sizes)[:, None]
            check_scales(scale, "weight_scale divided by weight_global_scale", NOT_NEGATIVE)
        q = codes.to(torch.int8) - 8
        return IntegerWeight(q, scale / 2, self.group_size, 4, table=doubled_fp4())
