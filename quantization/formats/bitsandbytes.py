"""bitsandbytes checkpoints: NF4 and FP4 (with double quantization), and int8. Their tensors say which layers have them.

4 bits: two values in a byte, the first in the high nibble, over the rows as one run; blocks of it share the largest
magnitude, `absmax`. Where a block ends within a row, groups are the longest runs of columns that never cross its end.
With double quantization each `absmax` is itself a byte: map[byte] * nested_absmax[block] + offset.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from llm.errors import CheckpointError, UnsupportedModelError
from llm.quantization.base import QuantizationConfig, QuantizeMethodBase, WeightLoader
from llm.quantization.description import Fields, agreed
from llm.quantization.quantizer import IntegerWeight
from llm.quantization.registry import get_scheme
from llm.quantization.schemes import SCHEMES, IntegerMethod
from llm.quantization.storage import FINITE, NOT_NEGATIVE, Ready, WeightStorage, check_scales
from llm.quantization.unquantized import left_alone

_SOURCE = "bitsandbytes"
_LM_HEAD = "lm_head"
# What follows `weight.` in the names of a 4-bit weight's other tensors -> what they are called here.
_PARTS = {
    "absmax": "absmax",
    "quant_map": "quant_map",
    "nested_absmax": "nested_absmax",
    "nested_quant_map": "nested_quant_map",
    "quant_state.bitsandbytes__nf4": "quant_state",
    "quant_state.bitsandbytes__fp4": "quant_state",
}


class BitsAndBytesConfig(QuantizationConfig):
    """Weights alone: activations are float32, where LLM.int8() has those without outliers rounded to int8."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self._shapes: Mapping[str, tuple[int, ...]] | None = None

    def get_name(self) -> str:
        return _SOURCE

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> BitsAndBytesConfig:
        given = Fields(config, f"{_SOURCE}: quantization_config")
        eight, four = given.boolean("load_in_8bit", False), given.boolean("load_in_4bit", False)
        if eight == four:
            raise given.error("load_in_4bit", "true, or load_in_8bit, and not both")
        return cls(8 if eight else 4)

    def describe_tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes
        if not any(name.endswith((".weight.absmax", ".SCB")) for name in shapes):
            raise UnsupportedModelError(
                "config.json has the weights quantized by bitsandbytes while they are loaded; pass "
                "hf_overrides={'quantization_config': None} with quantization='nf4' or 'w8a16'."
            )

    def parameter_name(self, name: str) -> str:
        layer, found, part = name.partition(".weight.")
        return f"{layer}.weight_{_PARTS[part]}" if found and part in _PARTS else name

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        kind = getattr(layer, "quant_kind", "")
        if kind not in ("linear", "embedding"):
            return None
        if kind == "embedding" and (not getattr(layer, "is_lm_head", False) or prefix != _LM_HEAD):
            return left_alone(kind, _SOURCE, "an embedding")
        if self._shapes is None:
            raise UnsupportedModelError("random weights (load_format='dummy') are not made in bitsandbytes' formats.")
        names = self.checkpoint_names(prefix)
        form = agreed(prefix, names, self._form)
        if form is None:
            return left_alone(kind, _SOURCE, "floats in the checkpoint")
        nested = form == "4 bits, nested"
        storage: WeightStorage = Int8Storage() if form == "int8" else FourBitStorage(nested, names)
        scheme = "W8A16" if form == "int8" else "W4A16"
        reason = f"{form}, activations are not quantized"
        if kind == "embedding":
            return IntegerMethod(SCHEMES[scheme], storage, _SOURCE, reason)
        method: QuantizeMethodBase = get_scheme(scheme, kind)(storage, _SOURCE, reason)
        return method

    def _form(self, name: str) -> str | None:
        shapes = self._shapes or {}
        if f"{name}.SCB" in shapes:
            return "int8"
        if f"{name}.weight.absmax" not in shapes:
            return None
        return "4 bits, nested" if f"{name}.weight.nested_absmax" in shapes else "4 bits"


# --- Storage. ---

_TENSORS = ("weight", "weight_absmax", "weight_quant_map", "weight_quant_state")
_NESTED = ("weight_nested_absmax", "weight_nested_quant_map")
_STATE_BYTES = 1 << 16
_LARGEST_BLOCK = 1 << 20
# Smaller groups would take more memory for scales than for weights.
_SMALLEST_GROUP = 8
Tensors = Mapping[str, torch.Tensor]


class FourBitStorage(WeightStorage):
    """NF4 or FP4: the 16 values are in the checkpoint. Its tensors are kept as they are until all of them are there.

    Args:
        nested: double quantization.
        names: the checkpoint's names of the layer's shards, for error messages.
    """

    def __init__(self, nested: bool, names: Sequence[str]) -> None:
        super().__init__()
        self._parts = _TENSORS + (_NESTED if nested else ())
        self._owners = [f"{name.rpartition('.')[2]}." if len(names) > 1 else "" for name in names]

    def create(
        self, layer: nn.Module, sizes: list[int], columns: int, dtype: torch.dtype, loader: WeightLoader, ready: Ready
    ) -> None:
        self._sizes, self._columns = sizes, columns
        self._shard_ids: tuple[str | int, ...] = tuple(getattr(layer, "shard_ids", ()))
        if getattr(layer, "tp_size", 1) > 1:
            raise UnsupportedModelError(
                f"{getattr(layer, 'prefix', 'a layer')}: blocks of bitsandbytes cannot be divided by ranks."
            )
        self._loaded: list[dict[str, torch.Tensor]] = [{} for _ in sizes]
        self._together: dict[str, torch.Tensor] = {}
        for name in self._parts:
            # One number for each shard, to count by.
            count = torch.empty(len(sizes))
            self.add(layer, name, count, partial(self._load, name), any_dtype=True, is_packed=True)

    def _load(self, name: str, param: nn.Parameter, loaded: torch.Tensor, shard_id: str | int | None = None) -> int:
        if shard_id is None and len(self._sizes) > 1:
            self._together[name] = loaded
            return len(self._sizes)
        self._loaded[0 if shard_id is None else self._shard_ids.index(shard_id)][name] = loaded
        return 1

    def read(self, layer: nn.Module) -> IntegerWeight:
        if self._together and (len(self._together) < len(self._parts) or any(self._loaded)):
            raise CheckpointError("some tensors of a fused layer are stored together and others are not.")
        loaded, sizes = ([self._together], [sum(self._sizes)]) if self._together else (self._loaded, self._sizes)
        owners = self._owners if len(self._owners) == len(loaded) else [""] * len(loaded)
        states = [
            _State(parts, (rows, self._columns), owner)
            for parts, rows, owner in zip(loaded, sizes, owners, strict=True)
        ]
        tables = [parts["weight_quant_map"] for parts in loaded]
        if any(not torch.equal(table, tables[0]) for table in tables):
            raise CheckpointError("quant_map differs between the shards of a fused layer.")
        check_scales(tables[0], f"{owners[0]}weight.quant_map", FINITE)
        group = math.gcd(self._columns, *(state.block for state in states))
        if group < _SMALLEST_GROUP:
            raise UnsupportedModelError(
                f"blocks of {states[0].block} cross rows of {self._columns} columns, which leaves groups of {group}; "
                "use the unquantized checkpoint with quantization='nf4'."
            )
        q = torch.cat([state.values(parts["weight"]) for state, parts in zip(states, loaded, strict=True)])
        scale = torch.cat([state.scales(parts, group) for state, parts in zip(states, loaded, strict=True)])
        # Rows by head are sorted here, where they are unpacked.
        restacked: Callable[[torch.Tensor, int], torch.Tensor] | None = getattr(layer, "restacked", None)
        if self._together and restacked is not None:
            q, scale = restacked(q, 0), restacked(scale, 0)
        self._loaded.clear()
        self._together.clear()
        return IntegerWeight(q, scale, group, 4, table=tables[0].float())


class _State:
    """The JSON text that describes one 4-bit weight, checked against its tensors before any memory is taken.

    Attributes:
        block: values that share an `absmax`.
    """

    def __init__(self, parts: Tensors, shape: tuple[int, int], owner: str) -> None:
        """`owner`: what the names of its tensors begin with in error messages."""
        stored, name = parts["weight_quant_state"], f"{owner}weight.quant_state"
        if stored.dtype != torch.uint8 or stored.numel() > _STATE_BYTES:
            raise CheckpointError(f"{name} is {stored.dtype} {list(stored.shape)}, must be a short text in bytes.")
        try:
            given = json.loads(bytes(stored.flatten().tolist()))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{name} is no JSON text.") from error
        fields = Fields(given, name)
        self._shape, self._owner = shape, owner
        self.block = _block(fields, "blocksize")
        self._nested = "weight_nested_absmax" in parts
        self._nested_block = _block(fields, "nested_blocksize") if self._nested else 0
        offset = fields.given.get("nested_offset", 0.0)
        if isinstance(offset, bool) or not isinstance(offset, int | float) or not abs(offset) < math.inf:
            raise fields.error("nested_offset", "a number")
        self._offset = float(offset)
        if fields.given.get("shape") != list(shape):
            raise fields.error("shape", f"{list(shape)}, as the model has it")
        self._check_sizes(parts)

    def _check_sizes(self, parts: Tensors) -> None:
        count = math.prod(self._shape)
        blocks = -(-count // self.block)
        sizes = {"weight": (-(-count // 2), torch.uint8), "weight_quant_map": (16, torch.float32)}
        sizes["weight_absmax"] = (blocks, torch.uint8 if self._nested else torch.float32)
        if self._nested:
            sizes["weight_nested_absmax"] = (-(-blocks // self._nested_block), torch.float32)
            sizes["weight_nested_quant_map"] = (256, torch.float32)
        for part, (size, dtype) in sizes.items():
            tensor, name = parts[part], self._owner + part.replace("_", ".", 1)
            if tensor.numel() != size or tensor.dtype != dtype:
                raise CheckpointError(f"{name} is {tensor.dtype} {list(tensor.shape)}, must be {size} of {dtype}.")
            if dtype.is_floating_point and not tensor.isfinite().all():
                raise CheckpointError(f"{name} has values that are not finite.")

    def values(self, packed: torch.Tensor) -> torch.Tensor:
        """int8 [N, K]: codes less 8."""
        packed = packed.flatten()
        codes = torch.stack((packed >> 4, packed & 15), dim=1).flatten()[: math.prod(self._shape)]
        return (codes.to(torch.int8) - 8).view(self._shape)

    def scales(self, parts: Tensors, group: int) -> torch.Tensor:
        """float32 [N, K / group]: the `absmax` of the block that each group is in."""
        absmax = parts["weight_absmax"].flatten()
        if self._nested:
            outer = parts["weight_nested_absmax"].flatten().repeat_interleave(self._nested_block)[: len(absmax)]
            absmax = parts["weight_nested_quant_map"].flatten()[absmax.long()] * outer + self._offset
        check_scales(absmax, f"{self._owner}weight.absmax", FINITE)
        starts = torch.arange(0, math.prod(self._shape), group)
        return absmax[starts // self.block].view(self._shape[0], -1)


def _block(fields: Fields, key: str) -> int:
    size = fields.integer(key, 0)
    if not 0 < size <= _LARGEST_BLOCK:
        raise fields.error(key, f"from 1 to {_LARGEST_BLOCK}")
    return size


class Int8Storage(WeightStorage):
    """LLM.int8(): `weight` int8 [N, K], and `SCB` float32 [N], the largest magnitude of each row: w = q * SCB / 127.

    `weight_format` is 0 if rows are rows; other layouts are those of one GPU each.
    """

    def create(
        self, layer: nn.Module, sizes: list[int], columns: int, dtype: torch.dtype, loader: WeightLoader, ready: Ready
    ) -> None:
        self._columns = columns
        data = torch.empty(sum(sizes), columns, dtype=torch.int8)
        self.add(layer, "weight", data, loader, output_dim=0, input_dim=1)
        self.add(layer, "SCB", torch.empty(sum(sizes)), loader, NOT_NEGATIVE, output_dim=0)
        stored = torch.zeros(len(sizes), dtype=torch.uint8)
        self.add(layer, "weight_format", stored, self._load_format, optional=True, any_dtype=True)

    def _load_format(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: str | int | None = None) -> int:
        if loaded.any():
            raise ValueError(
                f"is {loaded.flatten()[0].item()}, a layout of one GPU, and read is 0, rows; use the unquantized "
                "checkpoint with quantization='w8a16'"
            )
        return param.numel() if shard_id is None else 1

    def read(self, layer: nn.Module) -> IntegerWeight:
        scale = self.take(layer, "SCB").float()
        return IntegerWeight(self.take(layer, "weight"), (scale / 127)[:, None], self._columns, 8)
