"""What GPTQ's and AWQ's configs share: a layer is quantized if the checkpoint has integers for it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from torch import nn

from llm.errors import CheckpointError
from llm.quantization.base import QuantizationConfig, QuantizeMethodBase
from llm.quantization.configs.reader import Fields
from llm.quantization.matching import agreed, columns_of
from llm.quantization.registry import get_scheme
from llm.quantization.schemes.method import IntegerMethod
from llm.quantization.schemes.table import SCHEMES
from llm.quantization.storage.base import WeightStorage
from llm.quantization.unquantized import left_alone

_LM_HEAD = "lm_head"


class WordsConfig(QuantizationConfig):
    """Integers in 32-bit words, with float activations.

    Which layers have them is seen in the checkpoint; what its description says of it, in lists and patterns that each
    program writes in its own way, is needed for random weights alone.
    """

    _shapes: Mapping[str, tuple[int, ...]] | None = None

    @abstractmethod
    def described(self, name: str) -> bool:
        """Whether the description has the layer quantized."""

    @abstractmethod
    def bits_and_group(self, name: str) -> tuple[int, int]:
        """(bits, group size, -1 for all columns) of a quantized layer."""

    @abstractmethod
    def storage(self, bits: int, group_size: int | None) -> WeightStorage: ...

    def describe_tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        kind = getattr(layer, "quant_kind", "")
        if kind not in ("linear", "embedding"):
            return None
        if kind == "embedding" and (not getattr(layer, "is_lm_head", False) or prefix != _LM_HEAD):
            return left_alone(kind, self.get_name(), "an embedding")
        found = agreed(prefix, self.checkpoint_names(prefix), self._find)
        if found is None:
            return left_alone(kind, self.get_name(), "no integers in the checkpoint" if self._shapes else "left out")
        bits, group_size = found
        columns = columns_of(layer)
        if group_size > columns:
            raise CheckpointError(f"{prefix} has {columns} columns, and groups are of {group_size}.")
        size = None if group_size == -1 else group_size
        scheme = "W4A16" if bits <= 4 else "W8A16"
        reason = f"{bits} bits, {'one scale per row' if size is None else f'groups of {size}'}"
        storage = self.storage(bits, size)
        if kind == "embedding":
            return IntegerMethod(SCHEMES[scheme], storage, self.get_name(), reason)
        method: QuantizeMethodBase = get_scheme(scheme, kind)(storage, self.get_name(), reason)
        return method

    def _find(self, name: str) -> tuple[int, int] | None:
        has = self.described(name) if self._shapes is None else f"{name}.qweight" in self._shapes
        return self.bits_and_group(name) if has else None

    def ignores_zeros(self, name: str) -> bool:
        """Some programs write a bias for every layer."""
        return name.endswith(".bias") and f"{name.removesuffix('.bias')}.qweight" in (self._shapes or {})


def group_size_of(given: Fields, key: str, default: int) -> int:
    """Of at least 1, or -1."""
    size = given.integer(key, default)
    if size < 1 and size != -1:
        raise given.error(key, "at least 1, or -1 for one scale per row")
    return size
