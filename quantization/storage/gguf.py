"""The tensors of GGUF files: raw rows of blocks, decoded as they arrive into the integers that are computed with.

Shards of a fused layer may be of different types (the Q4_K_M mixture stores some value projections as Q6_K). Such a
layer is held in the form that all of them have exactly: int8, groups of the smaller size, a minimum where one has it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llm.kernels.weight import LEAST
from llm.quantization.quantizer import IntegerWeight
from llm.quantization.storage.gguf_blocks import BLOCKS, Block, Decoded
from llm.quantization.storage.streamed import StreamedStorage

# Blocks are decoded so many values at a time: temporary memory stays small.
_VALUES_AT_ONCE = 1 << 20


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

    def fill(self, weight: IntegerWeight, rows: slice, loaded: torch.Tensor, shard: int) -> None:
        kind = self.types[shard % len(self.types)]
        block = BLOCKS[kind]
        expected = [rows.stop - rows.start, self._columns // block.values * block.bytes]
        if self._columns % block.values or list(loaded.shape) != expected or loaded.dtype != torch.uint8:
            raise ValueError(f"has {list(loaded.shape)} bytes of {kind}, the model needs {expected}")
        step = max(1, _VALUES_AT_ONCE // self._columns)
        for first in range(0, len(loaded), step):
            part = loaded[first : first + step]
            start = rows.start + first
            self._place(weight, slice(start, start + len(part)), decode(part, block), block)

    def finish(self, weight: IntegerWeight) -> None:
        if self.table:
            weight.table = torch.tensor(self.table, dtype=torch.float32)

    def _place(self, weight: IntegerWeight, rows: slice, decoded: Decoded, block: Block) -> None:
        """Into the layer's form, which changes no value: see `Weight` for codes and minima."""
        scale, minimum, q = decoded.scale, decoded.minimum, decoded.q
        for values in (scale, minimum):
            if values is not None and not values.isfinite().all():
                raise ValueError("has a scale that is not finite")
        if block.table and not self.table:
            q = torch.tensor(block.table, dtype=torch.int8)[q.long() + 8]
        least = LEAST[self.kind]
        if minimum is not None:
            q = (q.to(torch.int16) - least).to(torch.int8)
        elif self.has_minimum:
            minimum = scale * least  # exact: a power of two
        repeats = block.group // self.group_size
        weight.q[rows] = q
        weight.scale[rows] = scale.repeat_interleave(repeats, dim=1)
        if weight.minimum is not None and minimum is not None:
            weight.minimum[rows] = minimum.repeat_interleave(repeats, dim=1)


def decode(raw: torch.Tensor, block: Block) -> Decoded:
    """Rows of a tensor: uint8 [R, bytes] -> values [R, K], scales and minima [R, groups]."""
    if block.decode is None:
        raise ValueError("floats are read as they are")
    decoded = block.decode(raw.reshape(-1, block.bytes))
    rows = len(raw)
    minimum = None if decoded.minimum is None else decoded.minimum.reshape(rows, -1)
    return Decoded(decoded.q.view(rows, -1), decoded.scale.reshape(rows, -1), minimum)
