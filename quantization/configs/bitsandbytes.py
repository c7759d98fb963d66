"""bitsandbytes checkpoints: NF4 and FP4 (with double quantization), and int8. Their tensors say which layers have them.

`storage/bitsandbytes.py` reads the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from llm.errors import UnsupportedModelError
from llm.quantization.base import QuantizationConfig, QuantizeMethodBase
from llm.quantization.configs.reader import Fields
from llm.quantization.matching import agreed
from llm.quantization.registry import get_scheme
from llm.quantization.schemes.method import IntegerMethod
from llm.quantization.schemes.table import SCHEMES
from llm.quantization.storage.base import WeightStorage
from llm.quantization.storage.bitsandbytes import FourBitStorage, Int8Storage
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
