"""`LLM(requantize=...)`: a quantized checkpoint's layers in another scheme, chosen as by `quantization=` on load.

Codes of 4 bits are not rounded to 4 bits a second time where the asked scheme computes them as they are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from llm.quantization.base import QuantizationConfig, QuantizeMethodBase, WeightLoader
from llm.quantization.on_load import INTEGERS, ON_LOAD, OnlineConfig, QuantizeOnLoad
from llm.quantization.quantizer import IntegerWeight
from llm.quantization.schemes import SCHEMES, IntegerMethod
from llm.quantization.storage import Ready, WeightStorage


class RequantizeConfig(QuantizationConfig):
    """What the checkpoint stores as floats stays as it is, and so do 4 bits that the asked scheme computes as stored.

    In a file with layers of 4 bits, those that it stores in more get 8 bits where 4 are asked for: its author chose so.

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
        is_small = isinstance(found, IntegerMethod) and SCHEMES[found.scheme].bits <= 4
        if not is_small and self.stored.has_four_bits():
            self.online.eight_bits[prefix] = "as the file stores other layers in 4 bits and these in more"
        again = self.online.get_quant_method(layer, prefix)
        if not isinstance(found, IntegerMethod) or not isinstance(again, IntegerMethod):
            return found
        if not isinstance(again.storage, QuantizeOnLoad):
            return found
        target = again.storage
        if is_small and self._is_smaller_head(layer, found, again):
            found.reason, found.summary = f"kept as stored, {found.reason}", "kept as stored"
            return found
        keeps = is_small and target.bits <= 4 and target.form in INTEGERS
        asks = keeps and self.online.asks_group_size(prefix)

        def computed(weight: IntegerWeight) -> bool:
            return again.computes(weight) and not (asks and weight.group_size != target.group_size)

        again.storage = Requantized(found.storage, target, computed if keeps else None)
        again.holds_bias = again.storage.holds_bias
        again.source = f"requantize={self.online.scheme!r}"
        again.reason = f"{again.reason}, from {found.reason}"
        if keeps:
            again.reason = again.reason.removeprefix(f"{ON_LOAD}: ")
        return again

    def _is_smaller_head(self, layer: nn.Module, found: IntegerMethod, again: IntegerMethod) -> bool:
        """An LM head that the user did not name: 4 bits with the same activations are smaller, and exact."""
        if getattr(layer, "quant_kind", "") != "embedding" or self.online.lm_head_asked:
            return False
        return SCHEMES[found.scheme].activations == SCHEMES[again.scheme].activations

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


class Requantized(WeightStorage):
    """What `stored` reads, as `target` would quantize those values; or as it is.

    Args:
        stored: of the checkpoint.
        target: holds no tensor of the checkpoint.
        computed: whether a stored weight is computed as it is, and so kept; None: it never is.

    Attributes:
        kept: it was; valid after loading.
    """

    def __init__(
        self, stored: WeightStorage, target: QuantizeOnLoad, computed: Callable[[IntegerWeight], bool] | None = None
    ) -> None:
        super().__init__()
        self.stored = stored
        self.target = target
        self.computed = computed
        self.bits = target.bits
        self.holds_bias = stored.holds_bias
        self.kept = False

    def create(
        self, layer: nn.Module, sizes: list[int], columns: int, dtype: torch.dtype, loader: WeightLoader, ready: Ready
    ) -> None:
        self.stored.create(layer, sizes, columns, dtype, loader, lambda weight: ready(self._taken(weight)))

    def read(self, layer: nn.Module) -> IntegerWeight | None:
        weight = self.stored.read(layer)
        return None if weight is None else self._taken(weight)

    def remove(self, layer: nn.Module) -> None:
        self.stored.remove(layer)

    def _taken(self, weight: IntegerWeight) -> IntegerWeight:
        if self.computed is None:
            return self.target.again(weight)
        self.kept = self.computed(weight)
        self.note = "kept as stored" if self.kept else "rounded again, as the scheme cannot compute them as stored"
        return weight if self.kept else self.target.again(weight)

    @property
    def signal_to_noise(self) -> float:
        """Against the checkpoint's values, in decibels."""
        return self.target.signal_to_noise

    @property
    def energies(self) -> tuple[float, float]:
        """The sums of squares of the checkpoint's values, and of the error."""
        return self.target.energies
