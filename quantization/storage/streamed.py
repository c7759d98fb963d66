"""Weights that become integers tensor by tensor while they are loaded.

Owns what such storages share: the integers of the whole layer, allocated when its first shard arrives, which shard
fills which rows, and handing the weight over as soon as its last row is there. So memory holds at most one layer beside
the packed ones.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import nn

from llm.base.construction import Scratch, construction
from llm.quantization.base import WeightLoader
from llm.quantization.quantizer import IntegerWeight
from llm.quantization.storage.base import Ready, WeightStorage


class StreamedStorage(WeightStorage):
    """A weight [N, K] whose only parameter, `weight`, is a meta tensor that is never filled.

    Args:
        bits: of the integers.
        group_size: columns that share a scale; divides K.
        has_minimum: a minimum is subtracted.
        stored_dtype: of the parameter, which says what the checkpoint stores; None: the layer's.
    """

    def __init__(
        self, bits: int, group_size: int, has_minimum: bool = False, stored_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.bits = bits
        self.group_size = group_size
        self.has_minimum = has_minimum
        self._stored_dtype = stored_dtype
        self._values: IntegerWeight | None = None
        self._rows_loaded = 0
        self._scratch: Scratch | None = None

    def create(
        self, layer: nn.Module, sizes: list[int], columns: int, dtype: torch.dtype, loader: WeightLoader, ready: Ready
    ) -> None:
        self._sizes, self._columns, self._ready = sizes, columns, ready
        self._shard_ids: tuple[Any, ...] = tuple(getattr(layer, "shard_ids", ()))
        self._platform = construction().platform
        self._scratch = construction().scratch
        data = torch.empty(sum(sizes), columns, dtype=self._stored_dtype or dtype, device="meta")
        self.add(layer, "weight", data, self._load, output_dim=0, input_dim=1)

    def read(self, layer: nn.Module) -> IntegerWeight | None:
        return None

    @abstractmethod
    def fill(self, weight: IntegerWeight, rows: slice, loaded: torch.Tensor, shard: int) -> None:
        """Write a checkpoint's tensor into these rows of the layer's weight.

        `shard` is 0 for a tensor that fills the layer. Raises ValueError for a tensor that does not fit.
        """

    def finish(self, weight: IntegerWeight) -> None:
        """Called with the whole weight before it is handed over."""

    def _load(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: Any = None) -> int:
        shard = 0 if shard_id is None else self._shard_ids.index(shard_id)
        start = sum(self._sizes[:shard])
        count = sum(self._sizes) if shard_id is None else self._sizes[shard]
        if self._values is None:
            self._values = self._allocated()
        self.fill(self._values, slice(start, start + count), loaded, shard)
        self._rows_loaded += count
        if self._rows_loaded == sum(self._sizes):
            self._hand_over()
        return count * self._columns

    def _allocated(self) -> IntegerWeight:
        rows, groups = sum(self._sizes), self._columns // self.group_size
        q = (self._scratch or Scratch()).empty(rows, self._columns)
        weight = IntegerWeight(q, torch.empty(rows, groups), self.group_size, self.bits)
        if self.has_minimum:
            weight.minimum = torch.empty(rows, groups)
        return weight

    def _hand_over(self) -> None:
        weight, self._values = self._values, None
        if weight is not None:
            self.finish(weight)
            self._ready(weight)
        del weight
        self._scratch = None  # the last layer of a model frees it
        if self._platform is not None:
            self._platform.release_memory()  # temporaries of decoding, quantizing and packing
