"""The tensors of GGUF files: raw rows of blocks, decoded as they arrive into the integers that are computed with.

Shards of a fused layer may be of different types (the Q4_K_M mixture stores some value projections as Q6_K). Such a
layer is held in the form that all of them have exactly: int8, groups of the smaller size, a minimum where one has it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llm.kernels.reference.gguf_blocks import BLOCKS
from llm.kernels.select import backend_of_construction
from llm.kernels.weight import LEAST
from llm.quantization.quantizer import IntegerWeight
from llm.quantization.storage.streamed import StreamedStorage


class GgufStorage(StreamedStorage):
    """A weight [N, K] whose parameter `weight` is filled with raw rows, uint8 [rows, bytes of a row].

    Args:
        types: of the tensor that fills the layer, or of each of its shards.

    Attributes:
        kind: of the weight that holds all types exactly, "int8" or "int4".
        group_size: columns that share a scale in it.
        has_minimum: a minimum is subtracted.
        table: the whole numbers that codes of 4 bits stand for; (): themselves, less 8.
    """

    def __init__(self, types: Sequence[str]) -> None:
        blocks = [BLOCKS[name] for name in types]
        self.types = tuple(types)
        # Shards with different tables, or without one beside one, are held as the numbers that their codes stand for.
        one_table = len({block.table for block in blocks}) == 1
        self.kind = "int4" if one_table and all(block.kind == "int4" for block in blocks) else "int8"
        self.table = blocks[0].table if self.kind == "int4" else ()
        has_minimum = any(block.has_minimum for block in blocks)
        super().__init__(
            4 if self.kind == "int4" else 8, min(block.group for block in blocks), has_minimum, torch.uint8
        )
        self._decode = backend_of_construction().op("decode_blocks")

    def fill(self, weight: IntegerWeight, rows: slice, loaded: torch.Tensor, shard: int) -> None:
        kind = self.types[shard % len(self.types)]
        block = BLOCKS[kind]
        expected = [rows.stop - rows.start, self._columns // block.values * block.bytes]
        if self._columns % block.values or list(loaded.shape) != expected or loaded.dtype != torch.uint8:
            raise ValueError(f"has {list(loaded.shape)} bytes of {kind}, the model needs {expected}")
        minimum = None if weight.minimum is None else weight.minimum[rows]
        looks_up = not self.table
        self._decode(loaded, kind, weight.q[rows], weight.scale[rows], minimum, LEAST[self.kind], looks_up)

    def finish(self, weight: IntegerWeight) -> None:
        if self.table:
            weight.table = torch.tensor(self.table, dtype=torch.float32)
