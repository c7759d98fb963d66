"""The tensors of GGUF files: raw rows of blocks, decoded as they arrive into the integers that are computed with.

Shards of a fused layer may be of different types (the Q4_K_M mixture stores some value projections as Q6_K). Such a
layer is held in the form that all of them have exactly: int8, groups of the smaller size, a minimum where one has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from llm.base.construction import construction
from llm.base.errors import CheckpointError
from llm.kernels.weight import LEAST
from llm.quantization.base import WeightLoader
from llm.quantization.quantizer import IntegerWeight
from llm.quantization.storage.base import Ready, WeightStorage
from llm.quantization.storage.gguf_blocks import BLOCKS, Block, Decoded
from llm.quantization.storage.on_load import scratch

# Blocks are decoded so many values at a time: temporary memory stays small.
_VALUES_AT_ONCE = 1 << 20


class GgufStorage(WeightStorage):
    """A weight [N, K] whose parameter `weight` is filled with raw rows, uint8 [rows, bytes of a row].

    Args:
        types: of the tensor that fills the layer, or of each of its shards.

    Attributes:
        kind: of the weight that holds all types exactly, "int8" or "int4".
        group_size: columns that share a scale in it.
        has_minimum: a minimum is subtracted.
    """

    def __init__(self, types: Sequence[str]) -> None:
        super().__init__()
        self.types = tuple(types)
        blocks = [BLOCKS[name] for name in types]
        self.kind = "int4" if all(block.kind == "int4" for block in blocks) else "int8"
        self.group_size = min(block.group for block in blocks)
        self.has_minimum = any(block.has_minimum for block in blocks)

    def create(
        self, layer: nn.Module, sizes: list[int], columns: int, dtype: torch.dtype, loader: WeightLoader, ready: Ready
    ) -> None:
        self._sizes, self._columns, self._ready = sizes, columns, ready
        self._shard_ids: tuple[Any, ...] = tuple(getattr(layer, "shard_ids", ()))
        self._platform = construction().platform
        self._q: torch.Tensor | None = None
        self._rows_loaded = 0
        data = torch.empty(sum(sizes), columns, dtype=torch.uint8, device="meta")
        self.add(layer, "weight", data, self._load, output_dim=0, input_dim=1)

    def read(self, layer: nn.Module) -> IntegerWeight | None:
        return None

    def _load(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: Any = None) -> int:
        start, rows, kind = self._part(shard_id)
        block = BLOCKS[kind]
        expected = [rows, self._columns // block.values * block.bytes]
        if self._columns % block.values or list(loaded.shape) != expected or loaded.dtype != torch.uint8:
            raise ValueError(f"has {list(loaded.shape)} bytes of {kind}, the model needs {expected}")
        step = max(1, _VALUES_AT_ONCE // self._columns)
        for first in range(0, rows, step):
            part = loaded[first : first + step]
            self._place(slice(start + first, start + first + len(part)), decode(part, block), block)
        self._rows_loaded += rows
        if self._rows_loaded == sum(self._sizes):
            self._finish()
        return rows * self._columns

    def _part(self, shard_id: Any) -> tuple[int, int, str]:
        """(first row, rows, type) of a shard; of all rows for None."""
        if shard_id is None:
            return 0, sum(self._sizes), self.types[0]
        index = self._shard_ids.index(shard_id)
        return sum(self._sizes[:index]), self._sizes[index], self.types[index % len(self.types)]

    def _values(self) -> torch.Tensor:
        """int8 [N, K], allocated with the scales when the first shard arrives."""
        if self._q is None:
            rows, groups = sum(self._sizes), self._columns // self.group_size
            self._q = scratch(rows, self._columns)
            self._scale = torch.empty(rows, groups)
            self._minimum = torch.empty(rows, groups) if self.has_minimum else None
        return self._q

    def _place(self, rows: slice, decoded: Decoded, block: Block) -> None:
        """Into the layer's form, which changes no value: see `Weight` for codes and minima."""
        scale, minimum, q = decoded.scale, decoded.minimum, decoded.q
        for values in (scale, minimum):
            if values is not None and not values.isfinite().all():
                raise CheckpointError("a GGUF tensor has a scale that is not finite.")
        least = LEAST[self.kind]
        if minimum is not None:
            q = (q.to(torch.int16) - least).to(torch.int8)
        elif self.has_minimum:
            minimum = scale * least  # exact: a power of two
        repeats = block.group // self.group_size
        self._values()[rows] = q
        self._scale[rows] = scale.repeat_interleave(repeats, dim=1)
        if self._minimum is not None and minimum is not None:
            self._minimum[rows] = minimum.repeat_interleave(repeats, dim=1)

    def _finish(self) -> None:
        q, self._q = self._values(), None
        bits = 4 if self.kind == "int4" else 8
        self._ready(IntegerWeight(q, self._scale, self.group_size, bits, minimum=self._minimum))
        del q, self._scale, self._minimum
        if self._platform is not None:
            self._platform.release_memory()  # what decoding and packing left behind


def decode(raw: torch.Tensor, block: Block) -> Decoded:
    """Rows of a tensor: uint8 [R, bytes] -> values [R, K], scales and minima [R, groups]."""
    if block.decode is None:
        raise ValueError("floats are read as they are")
    decoded = block.decode(raw.reshape(-1, block.bytes))
    rows = len(raw)
    minimum = None if decoded.minimum is None else decoded.minimum.reshape(rows, -1)
    return Decoded(decoded.q.view(rows, -1), decoded.scale.reshape(rows, -1), minimum)
