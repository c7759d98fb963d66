"""The interface between a checkpoint's tensors and a scheme's integers: `WeightStorage`, and what storages share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from llm.base.construction import Scratch, construction
from llm.errors import CheckpointError
from llm.quantization.base import WeightLoader
from llm.quantization.quantizer import IntegerWeight
from llm.quantization.unquantized import parameter_of

_LARGEST_OFFSET = 2**15
# Beyond it a product of weight and activation is near the end of float32, and the kernels multiply by 256 inside.
_LARGEST_SCALE = 2.0**100
# What scales must be, in words: in error messages, and by what.
POSITIVE, NOT_NEGATIVE, NOT_0, FINITE = "positive and finite", "finite and not negative", "finite and not 0", "finite"
_ALLOWED: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    POSITIVE: lambda scale: scale > 0,
    NOT_NEGATIVE: lambda scale: scale >= 0,
    NOT_0: lambda scale: scale != 0,
    FINITE: torch.isfinite,
}
# Scales that are stored as a byte are powers of two (E8M0): 2 ** (byte - 127), and 255 is NaN.
_EXPONENT_BIAS, _NO_EXPONENT = 127, 255
Ready = Callable[[IntegerWeight], None]


class WeightStorage(ABC):
    """The parameters of one layer's weight in a checkpoint format.

    Attributes:
        holds_bias: the format stores the bias with the integers, so the checkpoint may lack the layer's bias.
        on_load: the checkpoint has floats, which are quantized while they are loaded.
        note: what is known of the weight only after reading it, for the reason that is shown.
    """

    holds_bias = False
    on_load = False
    note = ""

    def __init__(self) -> None:
        self._names: list[str] = []

    @abstractmethod
    def create(
        self, layer: nn.Module, sizes: list[int], columns: int, dtype: torch.dtype, loader: WeightLoader, ready: Ready
    ) -> None:
        """Register the parameters of a weight [sum(sizes), columns] whose fused shards have `sizes` rows.

        A storage that has the weight before loading ends calls `ready` with it.
        """

    @abstractmethod
    def read(self, layer: nn.Module) -> IntegerWeight | None:
        """The loaded weight as integers; None if `ready` was called with it."""

    def add(
        self, layer: nn.Module, name: str, data: torch.Tensor, loader: WeightLoader, scales: str = "", /, **more: Any
    ) -> None:
        """Register one parameter; `optional=True` if a checkpoint may lack it, `scales` as in `checked`."""
        setattr(layer, name, parameter_of(data, checked(loader, scales) if scales else loader, **more))
        self._names.append(name)

    def take(self, layer: nn.Module, name: str) -> torch.Tensor:
        """The loaded value of a parameter."""
        return getattr(layer, name).data

    def was_loaded(self, layer: nn.Module, name: str) -> bool:
        """True if the checkpoint had this optional parameter."""
        return getattr(getattr(layer, name), "elements_loaded", 0) > 0

    def remove(self, layer: nn.Module) -> None:
        """Remove the checkpoint's parameters from the layer, which now has a packed weight."""
        for name in self._names:
            delattr(layer, name)
        self._names.clear()


def stored_sizes(layer: nn.Module, sizes: list[int]) -> list[int]:
    """Rows of each matrix of a layer as a checkpoint has them, of all ranks; this rank has `sizes`."""
    ids: int | None = getattr(layer, "num_embeddings", None)
    return list(getattr(layer, "output_sizes", sizes)) if ids is None else [ids]


def expand_slots(values: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """One value per fused shard [S] -> one per row [sum(sizes)]."""
    return values.repeat_interleave(torch.tensor(sizes))


def same_in_all_slots(values: torch.Tensor, what: str) -> float:
    """The value of a per-tensor quantity, which must be the same for all shards of a fused layer."""
    if not torch.equal(values, values[:1].expand_as(values)) and not values.isnan().all():
        raise CheckpointError(f"{what} differs between the shards of a fused layer: {values.tolist()}.")
    return float(values[0])


def whole_offset(value: float, what: str) -> int:
    """The offset of quantized activations, which formats store as a float."""
    if not math.isfinite(value) or value != round(value):
        raise CheckpointError(f"{what} is {value}, which is not whole.")
    if abs(value) > _LARGEST_OFFSET:
        raise CheckpointError(f"{what} is {value:g}, and at most {_LARGEST_OFFSET} is computed.")
    return round(value)


def group_loader(columns: int, shard_ids: Sequence[object]) -> WeightLoader:
    """A loader of the group of each input, [columns]: of all shards of a fused layer, or of one."""

    def load(param: nn.Parameter, loaded: torch.Tensor, shard_id: object = None) -> int:
        if list(loaded.shape) != [columns]:
            raise ValueError(f"has shape {list(loaded.shape)}, the model needs {[columns]}")
        target = param.data if shard_id is None else param.data[shard_ids.index(shard_id)]
        target[:] = loaded
        return target.numel()

    return load


def order_of_groups(group_of: torch.Tensor, size: int, name: str) -> torch.Tensor | None:
    """The inputs, group after group, int64 [K]; None where they are in their own order.

    Args:
        group_of: int32 [S, K], the group of each input for each shard of a fused layer.
        size: of a group.
        name: of the tensor, in error messages.

    Raises:
        CheckpointError: shards differ, or a group has more or fewer inputs.
    """
    if not torch.equal(group_of, group_of[:1].expand_as(group_of)):
        raise CheckpointError(f"{name} differs between the shards of a fused layer.")
    group = group_of[0].long()
    runs = torch.arange(len(group)) // size
    order = group.argsort(stable=True)
    if not torch.equal(group[order], runs):
        raise CheckpointError(
            f"{name} (from {int(group.min())} to {int(group.max())}) does not put {size} inputs into each of the "
            f"groups from 0 to {int(runs[-1])}."
        )
    return None if torch.equal(group, runs) else order


def checked(loader: WeightLoader, must_be: str) -> WeightLoader:
    """`loader` of scales that must be POSITIVE, NOT_NEGATIVE or NOT_0; errors name the checkpoint's own tensor."""

    def load(param: nn.Parameter, loaded: torch.Tensor, shard_id: object = None) -> int:
        wrong = _wrong(scale_values(loaded), must_be)
        if wrong:
            raise ValueError(wrong)
        return loader(param, loaded, shard_id)

    return load


def check_scales(scale: torch.Tensor, what: str, must_be: str) -> None:
    """The same for scales that are computed from several tensors; raises `CheckpointError`."""
    wrong = _wrong(scale, must_be)
    if wrong:
        raise CheckpointError(f"{what} {wrong}.")


def _wrong(scale: torch.Tensor, must_be: str) -> str:
    """What is wrong with scales, with the first of them that is; "" if nothing is."""
    fine = _ALLOWED[must_be](scale) & (scale.abs() <= _LARGEST_SCALE)
    if fine.all():
        return ""
    return f"must be {must_be}, and at most 2**100; it holds {float(scale[~fine].flatten()[0]):g}"


def scale_values(stored: torch.Tensor) -> torch.Tensor:
    """float32, of floats of any type or of exponents."""
    if stored.dtype == torch.float8_e8m0fnu:
        stored = stored.view(torch.uint8)
    if stored.dtype != torch.uint8:
        if not stored.is_floating_point():
            raise ValueError(f"is {stored.dtype}, scales are floats or bytes of exponents")
        return stored.float()
    if (stored == _NO_EXPONENT).any():
        raise ValueError("has a scale of 255, which is NaN")
    return torch.ldexp(torch.ones(stored.shape), stored.to(torch.int32) - _EXPONENT_BIAS)


class StreamedStorage(WeightStorage):
    """A weight [N, K] that becomes integers tensor by tensor while it is loaded.

    Its only parameter, `weight`, is a meta tensor that is never filled. The integers of the whole layer are allocated
    when its first shard arrives, and handed over as soon as its last row is there: memory holds at most one layer
    beside the packed ones.

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
        # Of a layer that ranks share, what takes this rank's rows out of a tensor.
        self._rows_of_rank: Callable[[torch.Tensor, object], torch.Tensor] | None = getattr(layer, "rows_of_rank", None)
        self._platform = construction().platform
        self._scratch, self._device = construction().scratch, construction().device
        data = torch.empty(sum(sizes), columns, dtype=self._stored_dtype or dtype, device="meta")
        self.add(layer, "weight", data, self._load, output_dim=0, input_dim=1)

    def read(self, layer: nn.Module) -> IntegerWeight | None:
        return None

    def see(self, loaded: torch.Tensor) -> None:
        """Called with a checkpoint's tensor before `fill` gets it, or this rank's rows of it."""

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
        self.see(loaded)
        if self._rows_of_rank is not None:
            loaded = self._rows_of_rank(loaded, shard_id)
        self.fill(self._values, slice(start, start + count), loaded, shard)
        self._rows_loaded += count
        if self._rows_loaded == sum(self._sizes):
            self._hand_over()
        return count * self._columns

    def _allocated(self) -> IntegerWeight:
        rows, groups = sum(self._sizes), self._columns // self.group_size
        if self._device.type == "cpu":
            q = (self._scratch or Scratch()).empty(rows, self._columns)
        else:
            q = torch.empty(rows, self._columns, dtype=torch.int8, device=self._device)
        weight = IntegerWeight(q, torch.empty(rows, groups, device=self._device), self.group_size, self.bits)
        if self.has_minimum:
            weight.minimum = torch.empty(rows, groups, device=self._device)
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
