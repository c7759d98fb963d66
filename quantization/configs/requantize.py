"""`LLM(requantize=...)`: a quantized checkpoint's layers in another scheme, chosen as by `quantization=` on load."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from llm.quantization.base import QuantizationConfig, QuantizeMethodBase
from llm.quantization.configs.online import OnlineConfig
from llm.quantization.schemes.method import IntegerMethod
from llm.quantization.storage.on_load import QuantizeOnLoad
from llm.quantization.storage.requantized import Requantized


class RequantizeConfig(QuantizationConfig):
    """What the checkpoint stores as floats stays as it is.

    Attributes:
        stored: reads the checkpoint.
        online: chooses the schemes.
    """

    def __init__(self, stored: QuantizationConfig, online: OnlineConfig) -> None:
        self.stored = stored
        self.online = online
        self.static_cache = stored.static_cache

    def get_name(self) -> str:
        return self.stored.get_name()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        for config in (self.stored, self.online):
            config.packed_modules_mapping = self.packed_modules_mapping
        found = self.stored.get_quant_method(layer, prefix)
        again = self.online.get_quant_method(layer, prefix)
        if not isinstance(found, IntegerMethod) or not isinstance(again, IntegerMethod):
            return found
        if not isinstance(again.storage, QuantizeOnLoad):
            return found
        again.storage = Requantized(found.storage, again.storage)
        again.holds_bias = again.storage.holds_bias
        again.source = f"requantize={self.online.scheme!r}"
        again.reason = f"{again.reason}, from {found.reason}"
        return again

    def apply_mapper(self, to_checkpoint: Callable[[str], str]) -> None:
        self.stored.apply_mapper(to_checkpoint)
        self.online.apply_mapper(to_checkpoint)

    def describe_tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.stored.describe_tensors(shapes)
        self.static_cache = self.stored.static_cache

    def parameter_name(self, name: str) -> str:
        return self.stored.parameter_name(name)

    def prepare_model(self, model: nn.Module) -> None:
        self.stored.prepare_model(model)

    def ignores(self, name: str) -> bool:
        return self.stored.ignores(name)

    def ignores_zeros(self, name: str) -> bool:
        return self.stored.ignores_zeros(name)

    def check_used(self) -> None:
        self.stored.check_used()
        self.online.check_used()
