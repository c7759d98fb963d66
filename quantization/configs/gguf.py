"""GGUF: the type of each tensor -> what computes its layer.

Owns the choice per layer, from the types that `llm.loading.gguf` found in the file, under Hugging Face's names. Blocks
are `kernels/reference/gguf_blocks.py`'s.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from torch import nn

from llm.errors import CheckpointError, UnsupportedModelError
from llm.kernels.reference.gguf_blocks import BLOCKS
from llm.quantization.base import QuantizationConfig, QuantizeMethodBase
from llm.quantization.configs.reader import Fields
from llm.quantization.matching import columns_of
from llm.quantization.registry import get_scheme
from llm.quantization.schemes.method import IntegerMethod
from llm.quantization.schemes.table import SCHEMES
from llm.quantization.storage.gguf import GgufStorage
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
