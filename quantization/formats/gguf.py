"""GGUF: the type of each tensor -> what computes its layer, and blocks as integers, read and written.

The types are those that `llm.loading.gguf` found in the file, under Hugging Face's names. Raw rows of blocks are
decoded as they arrive into the integers that are computed with; `kernels/reference/gguf_blocks.py` defines the blocks.
Shards of a fused layer may be of different types (the Q4_K_M mixture stores some value projections as Q6_K). Such a
layer is held in the form that all of them have exactly: int8, groups of the smaller size, a minimum where one has it.
Saving is the inverse: which of Q8_0, Q4_0, Q4_K and MXFP4 holds a weight exactly, and its bytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from llm.errors import CheckpointError, UnsupportedModelError
from llm.kernels.reference.gguf_blocks import BLOCKS
from llm.kernels.select import backend_of_construction
from llm.kernels.weight import LEAST
from llm.quantization.base import QuantizationConfig, QuantizeMethodBase
from llm.quantization.description import Fields, columns_of
from llm.quantization.packing import doubled_fp4
from llm.quantization.quantizer import IntegerWeight
from llm.quantization.registry import get_scheme
from llm.quantization.schemes import SCHEMES, IntegerMethod
from llm.quantization.storage import StreamedStorage
from llm.quantization.unquantized import left_alone

_SOURCE = "GGUF"
_SCHEMES = {"int4": "W4A16", "int8": "W8A16"}


class GGUFConfig(QuantizationConfig):
    """Integer weights with float activations.

    Args:
        types: tensor name -> its type, a name of `BLOCKS`.
    """

    def __init__(self, types: Mapping[str, str]) -> None:
        self.types = types

    def get_name(self) -> str:
        return "gguf"

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> GGUFConfig:
        given = Fields(config, "GGUF", frozenset(("quant_method", "types")))
        types = given.part("types")
        if types is None:
            raise CheckpointError("quant_method 'gguf' is of GGUF files: pass the path of the .gguf file itself.")
        found = {name: types.string(name, "") for name in types.given}
        for name, kind in found.items():
            if kind not in BLOCKS:
                raise types.error(name, "one of " + ", ".join(BLOCKS))
        return cls(found)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        kind = getattr(layer, "quant_kind", "")
        if kind not in ("linear", "embedding"):
            return None
        types = self._types_of(prefix)
        floats = {name for name in types if BLOCKS[name].dtype is not None}
        if not types or floats == set(types):
            return left_alone(kind, _SOURCE, " and ".join(sorted(floats)) or "not in the file")
        if floats:
            raise UnsupportedModelError(
                f"{prefix} joins tensors of floats ({', '.join(sorted(floats))}) with quantized ones "
                f"({', '.join(sorted(set(types) - floats))}), which is not computed; use a file that stores them alike."
            )
        storage = GgufStorage(types)
        columns = columns_of(layer)
        if columns % max(BLOCKS[name].values for name in types):
            raise CheckpointError(f"{prefix} has {columns} columns, which blocks of {types[0]} do not divide.")
        scheme = _SCHEMES[storage.kind]
        reason = _reason(storage, columns)
        if kind == "embedding":
            return IntegerMethod(SCHEMES[scheme], storage, _SOURCE, reason)
        return get_scheme(scheme, kind)(storage, _SOURCE, reason)

    def has_four_bits(self) -> bool:
        return any(BLOCKS[kind].kind == "int4" for name, kind in self.types.items() if ".layers." in name)

    def computed_with(self) -> dict[str, str]:
        """Most frequent first; each expert counts. A layer that joins types is held in the wider form."""
        counts = Counter(self.types.values()).most_common()
        return {name: f"{count} tensor{'s' if count > 1 else ''}, {_computed(name)}" for name, count in counts}

    def expected_bytes(self, tensors: Mapping[str, tuple[Sequence[int], int]]) -> int:
        """What tensors of these shapes, and of so many bytes in the file, take in memory; mixed layers at the least."""
        total = 0
        for name, (shape, nbytes) in tensors.items():
            block = BLOCKS[self.types[name]]
            if block.dtype is not None:
                total += nbytes
            else:
                values = math.prod(shape) // block.bytes * block.values
                total += int(values * _bits_in_memory(GgufStorage([self.types[name]]), exact_scales=False) / 8)
        return total

    def _types_of(self, prefix: str) -> list[str]:
        """Of the tensor that fills the layer; of each shard where a fused layer is several tensors."""
        own = self.types.get(f"{self._checkpoint_name(prefix)}.weight")
        if own is not None:
            return [own]
        found = [self.types.get(f"{name}.weight") for name in self.checkpoint_names(prefix)]
        return [kind for kind in found if kind is not None]

    def _checkpoint_name(self, prefix: str) -> str:
        return prefix if self._to_checkpoint is None else self._to_checkpoint(prefix)


def _bits_in_memory(storage: GgufStorage, exact_scales: bool = True) -> float:
    """Of a value, with its share of scales and minima: those of the K types are products, which take float32."""
    is_short = all(BLOCKS[name].values == 32 for name in storage.types)
    of_scale = 16 if is_short and (len(set(storage.types)) == 1 or not exact_scales) else 32
    bits = 4 if storage.kind == "int4" else 8
    return bits + of_scale * (2 if storage.has_minimum else 1) / storage.group_size


def _reason(storage: GgufStorage, columns: int) -> str:
    """E.g. "Q4_K, held in 6 bits a value (4.5 in the file)"."""
    names = " and ".join(dict.fromkeys(storage.types))
    in_file = sum(BLOCKS[name].bytes * 8 / BLOCKS[name].values for name in storage.types) / len(storage.types)
    bits = f"about {_bits_in_memory(storage):.3g} bits a value ({in_file:.3g} in the file)"
    return f"{names}: {_held(storage)}, {bits}"


def _computed(name: str) -> str:
    """Of a type."""
    return "computed as stored" if BLOCKS[name].dtype else f"float32 activations, {_held(GgufStorage([name]))}"


def _held(storage: GgufStorage) -> str:
    """E.g. "int4 in groups of 32 with minima"."""
    kind = "a table of 16" if storage.table else storage.kind
    return f"{kind} in groups of {storage.group_size}{' with minima' if storage.has_minimum else ''}"


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
        self._decode = backend_of_construction().ops.decode_blocks

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


# --- Saving. ---

_GROUP = 32
_LEVELS = 63


def type_of(weight: IntegerWeight) -> str:
    """The type whose blocks are this weight bit for bit; ValueError with the reason where there is none."""
    columns = weight.q.shape[1]
    if weight.q.is_floating_point():
        raise ValueError("8-bit floats")
    if weight.zero is not None or weight.columns is not None:
        raise ValueError("zero points or an order of its columns")
    if weight.group_size != _GROUP or columns % _GROUP:
        raise ValueError(f"groups of {weight.group_size}")
    if weight.table is not None:
        fraction, exponent = torch.frexp(weight.scale)
        is_power = bool(((fraction == 0.5) & (exponent > -127) & (exponent <= 127)).all())
        if not torch.equal(weight.table, doubled_fp4()) or not is_power:
            raise ValueError("a table of values")
        return "MXFP4"
    if weight.minimum is not None:
        if weight.bits != 4 or columns % BLOCKS["Q4_K"].values:
            raise ValueError(f"minima, in {weight.bits} bits and {columns} columns")
        return "Q4_K"
    if not torch.equal(weight.scale.half().float(), weight.scale):
        raise ValueError("scales that are no float16")
    return "Q4_0" if weight.bits == 4 else "Q8_0"


def pack_blocks(weight: IntegerWeight, kind: str) -> torch.Tensor:
    """uint8 [N, bytes of a row], for `gguf_blocks` to decode to the same; ValueError where Q4_K cannot hold it."""
    pack = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_K": _q4_k, "MXFP4": _mxfp4}[kind]
    return pack(weight).view(len(weight.q), -1)


def _half_bytes(values: torch.Tensor) -> torch.Tensor:
    """float32 [B, n] -> uint8 [B, 2n]."""
    return values.half().contiguous().view(torch.uint8)


def _joined(codes: torch.Tensor) -> torch.Tensor:
    """Codes from 0 to 15 [B, 32] -> uint8 [B, 16]: the first half in the low nibbles."""
    low, high = codes.to(torch.uint8).chunk(2, dim=1)
    return low | high << 4


def _q8_0(weight: IntegerWeight) -> torch.Tensor:
    return torch.cat((_half_bytes(weight.scale.reshape(-1, 1)), weight.q.reshape(-1, _GROUP).view(torch.uint8)), dim=1)


def _q4_0(weight: IntegerWeight) -> torch.Tensor:
    return torch.cat((_half_bytes(weight.scale.reshape(-1, 1)), _joined(weight.q.reshape(-1, _GROUP) + 8)), dim=1)


def _mxfp4(weight: IntegerWeight) -> torch.Tensor:
    """The scale is halved for a doubled table, so the byte counts from one more."""
    exponent = torch.frexp(weight.scale.reshape(-1, 1))[1] + 127
    return torch.cat((exponent.to(torch.uint8), _joined(weight.q.reshape(-1, _GROUP) + 8)), dim=1)


def _q4_k(weight: IntegerWeight) -> torch.Tensor:
    if weight.minimum is None:
        raise ValueError("no minima")
    unit, scales = _factors(weight.scale.reshape(-1, 8))
    base, minima = _factors(weight.minimum.reshape(-1, 8))
    first = scales[:, :4] | scales[:, 4:] >> 4 << 6
    second = minima[:, :4] | minima[:, 4:] >> 4 << 6
    third = scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4
    codes = (weight.q + 8).reshape(-1, 4, 2 * _GROUP).flatten(0, 1)
    return torch.cat((_half_bytes(unit), _half_bytes(base), first, second, third, _joined(codes).view(-1, 128)), dim=1)


def _factors(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [B, 8] as the products of a float16 [B, 1] and levels from 0 to 63, uint8 [B, 8]; ValueError if not.

    A file's own levels may have been others with the same products; the largest level is usually 63.
    """
    largest = values.abs().amax(dim=1, keepdim=True)
    sign = torch.where((values < 0).any(dim=1, keepdim=True), -1.0, 1.0)
    unit, levels = torch.zeros_like(largest), torch.zeros_like(values)
    found = largest[:, 0] == 0
    for top in range(_LEVELS, 0, -1):
        left = (~found).nonzero()[:, 0]
        if not len(left):
            break
        tried = (sign[left] * largest[left] / top).half().float()
        level = torch.where(tried == 0, torch.zeros_like(values[left]), (values[left] / tried).round())
        exact = ((level >= 0) & (level <= _LEVELS) & (level * tried == values[left])).all(dim=1)
        unit[left[exact]], levels[left[exact]] = tried[exact], level[exact]
        found[left[exact]] = True
    if not found.all():
        raise ValueError("scales that are no products of a float16 and 6 bits")
    return unit, levels.to(torch.uint8)
