"""The tensors of GPTQ and AWQ checkpoints: unsigned integers in 32-bit words, with a zero point and a scale per group.

A value is (q - zero) * scale, both q and zero unsigned. All tensors are transposed: inputs first.
"""

from __future__ import annotations

import torch
from torch import nn

from llm.errors import CheckpointError
from llm.quantization.base import WeightLoader
from llm.quantization.packing import packed_words, unpack_awq, unpack_from_int32
from llm.quantization.quantizer import IntegerWeight
from llm.quantization.storage.base import NOT_0, Ready, WeightStorage, order_of_groups

# What is added to the words of zero points that are stored less 1, by bits: 1 to every value. The borrow of a zero
# point of 0 was taken from the next value, and so the carry goes there.
_ONES = {2: (0x55555555,), 4: (0x11111111,), 8: (0x01010101,)}
# Values of 3 bits straddle words: they are added to one by one, but GPTQModel subtracts these words when it saves.
_GPTQMODEL_3_BITS = (0x24924924, 0x92492492, 0x49249249)


class _WordStorage(WeightStorage):
    """`scales` float [G, N] and `qzeros` int32 [G, words], beside `qweight`.

    Args:
        bits: of each value.
        group_size: columns that share a scale; None: all.
    """

    def __init__(self, bits: int, group_size: int | None) -> None:
        super().__init__()
        self.bits = bits
        self.group_size = group_size

    def create(
        self, layer: nn.Module, sizes: list[int], columns: int, dtype: torch.dtype, loader: WeightLoader, ready: Ready
    ) -> None:
        self._sizes, self._columns = sizes, columns
        self._size = self.group_size or columns
        self._shard_ids: tuple[str | int, ...] = tuple(getattr(layer, "shard_ids", ()))
        rows, groups = sum(sizes), -(-columns // self._size)
        words = packed_words(rows, self.bits)
        if any(size * self.bits % 32 for size in sizes):
            raise CheckpointError(
                f"{getattr(layer, 'prefix', 'a layer')} has {sizes} outputs, whose {self.bits}-bit zero points do not "
                "fill whole words of 32 bits."
            )
        places = {"output_dim": 1, "input_dim": 0}
        self._add_weight(layer, loader, rows, words, places)
        self.add(layer, "qzeros", torch.empty(groups, words, dtype=torch.int32), loader, **places)
        self.add(layer, "scales", torch.empty(groups, rows), loader, NOT_0, **places)

    def _add_weight(
        self, layer: nn.Module, loader: WeightLoader, rows: int, words: int, places: dict[str, int]
    ) -> None:
        raise NotImplementedError

    def _weight(self, q: torch.Tensor, zero: torch.Tensor, layer: nn.Module) -> IntegerWeight:
        """From q int8 [K, N] and zero int8 [G, N], each less 2 ** (bits - 1)."""
        scale = self.take(layer, "scales").float()
        held = zero.t().contiguous() if zero.any() else None
        return IntegerWeight(q.t().contiguous(), scale.t().contiguous(), self._size, self.bits, held)


class GPTQStorage(_WordStorage):
    """`qweight` int32 [K * bits / 32, N] and `g_idx` int32 [K], the group of each input; without it groups are runs.

    Args:
        stored_less_one: zero points are stored less 1, as all but `gptq_v2` checkpoints have them.
        by_gptqmodel: GPTQModel wrote them.
    """

    def __init__(self, bits: int, group_size: int | None, stored_less_one: bool, by_gptqmodel: bool) -> None:
        super().__init__(bits, group_size)
        self._less_one = stored_less_one
        self._added = _GPTQMODEL_3_BITS if by_gptqmodel and bits == 3 else _ONES.get(bits)

    def _add_weight(
        self, layer: nn.Module, loader: WeightLoader, rows: int, words: int, places: dict[str, int]
    ) -> None:
        data = torch.empty(packed_words(self._columns, self.bits), rows, dtype=torch.int32)
        self.add(layer, "qweight", data, loader, **places)
        # Of each shard: those of a fused layer must be equal.
        data = torch.empty(len(self._sizes), self._columns, dtype=torch.int32)
        self.add(layer, "g_idx", data, self._load_groups, optional=True, any_dtype=True)

    def read(self, layer: nn.Module) -> IntegerWeight:
        rows, groups = sum(self._sizes), -(-self._columns // self._size)
        zero = self._zeros(self.take(layer, "qzeros"), (groups, rows))
        q = unpack_from_int32(self.take(layer, "qweight"), self.bits, (self._columns, rows), dim=0)
        order = self._order(layer)
        weight = self._weight(q if order is None else q[order], zero, layer)
        weight.columns = None if order is None else order.int()
        return weight

    def _zeros(self, stored: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        """int8 [G, N], less 2 ** (bits - 1)."""
        if self._less_one and self._added is not None:
            words = torch.tensor(self._added).repeat(-(-stored.shape[1] // len(self._added)))[: stored.shape[1]]
            stored = (stored.long() + words).to(torch.int32)  # keeps the low 32 bits
        zero = unpack_from_int32(stored, self.bits, shape)
        if self._less_one and self._added is None:
            half = 1 << (self.bits - 1)
            zero = (zero + half + 1) % (2 * half) - half
        return zero

    def _load_groups(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: str | int | None = None) -> int:
        if list(loaded.shape) != [self._columns]:
            raise ValueError(f"has shape {list(loaded.shape)}, the model needs {[self._columns]}")
        target = param.data if shard_id is None else param.data[self._shard_ids.index(shard_id)]
        target[:] = loaded
        return target.numel()

    def _order(self, layer: nn.Module) -> torch.Tensor | None:
        """The inputs, group after group; None where they are in their own order."""
        if not self.was_loaded(layer, "g_idx"):
            return None
        return order_of_groups(self.take(layer, "g_idx"), self._size, "g_idx")


class AWQStorage(_WordStorage):
    """`qweight` int32 [K, N / 8] in AWQ's order of columns, which `qzeros` have as well."""

    def __init__(self, group_size: int | None) -> None:
        super().__init__(4, group_size)

    def _add_weight(
        self, layer: nn.Module, loader: WeightLoader, rows: int, words: int, places: dict[str, int]
    ) -> None:
        data = torch.empty(self._columns, words, dtype=torch.int32)
        self.add(layer, "qweight", data, loader, **places)

    def read(self, layer: nn.Module) -> IntegerWeight:
        q, zero = (unpack_awq(self.take(layer, name)) for name in ("qweight", "qzeros"))
        return self._weight(q, zero, layer)
