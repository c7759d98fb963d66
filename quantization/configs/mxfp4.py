"""`quant_method: mxfp4`, as gpt-oss publishes its experts: 4-bit floats with a power of two for each 32 columns.

Owns the choice per layer: the experts are quantized, everything else is stored as it is. `storage/floats.py` reads the
tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from llm.errors import CheckpointError
from llm.quantization.base import QuantizationConfig, QuantizeMethodBase
from llm.quantization.configs.reader import Fields
from llm.quantization.matching import agreed
from llm.quantization.registry import get_scheme
from llm.quantization.storage.floats import Float4Storage
from llm.quantization.unquantized import left_alone

_SOURCE = "mxfp4"
_WHERE = "mxfp4: quantization_config"
_EXPERTS = "experts"


class Mxfp4Config(QuantizationConfig):
    """Args:
    ignored: modules that are stored as they were, with `*` for a layer's number; experts are quantized unless they
        are named.
    """

    def __init__(self, ignored: tuple[str, ...]) -> None:
        self.ignored = ignored

    def get_name(self) -> str:
        return "mxfp4"

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> Mxfp4Config:
        given = Fields(config, _WHERE, frozenset(("quant_method", "modules_to_not_convert", "dequantize")))
        if given.boolean("dequantize", False):
            raise CheckpointError(f"{_WHERE} says that the weights were dequantized; remove it from config.json.")
        return cls(given.names("modules_to_not_convert"))

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        kind = getattr(layer, "quant_kind", "")
        if kind not in ("linear", "embedding"):
            return None
        if kind == "embedding" or not agreed(prefix, self.checkpoint_names(prefix), self._quantizes):
            return left_alone(kind, _SOURCE, "not an expert")
        reason = "float4_e2m1 in groups of 32, activations float32"
        return get_scheme("W4A16", kind)(Float4Storage(torch.uint8), _SOURCE, reason)

    def _quantizes(self, name: str) -> bool:
        segments = name.split(".")
        return _EXPERTS in segments and not any(_holds(item.split("."), segments) for item in self.ignored)


def _holds(pattern: list[str], segments: list[str]) -> bool:
    """Whether the module that a pattern names is `segments` or holds it."""
    return len(pattern) <= len(segments) and all(
        wanted in ("*", found) for wanted, found in zip(pattern, segments, strict=False)
    )
