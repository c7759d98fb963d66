"""A quantized checkpoint's weights, quantized again while they are loaded."""

from __future__ import annotations

import torch
from torch import nn

from llm.quantization.base import WeightLoader
from llm.quantization.quantizer import IntegerWeight
from llm.quantization.storage.base import Ready, WeightStorage
from llm.quantization.storage.on_load import QuantizeOnLoad


class Requantized(WeightStorage):
    """What `stored` reads, as `target` would quantize those values.

    Args:
        stored: of the checkpoint.
        target: holds no tensor of the checkpoint.
    """

    def __init__(self, stored: WeightStorage, target: QuantizeOnLoad) -> None:
        super().__init__()
        self.stored = stored
        self.target = target
        self.bits = target.bits
        self.holds_bias = stored.holds_bias

    def create(
        self, layer: nn.Module, sizes: list[int], columns: int, dtype: torch.dtype, loader: WeightLoader, ready: Ready
    ) -> None:
        self.stored.create(layer, sizes, columns, dtype, loader, lambda weight: ready(self.target.again(weight)))

    def read(self, layer: nn.Module) -> IntegerWeight | None:
        weight = self.stored.read(layer)
        return None if weight is None else self.target.again(weight)

    def remove(self, layer: nn.Module) -> None:
        self.stored.remove(layer)

    @property
    def signal_to_noise(self) -> float:
        """Against the checkpoint's values, in decibels."""
        return self.target.signal_to_noise

    @property
    def energies(self) -> tuple[float, float]:
        """The sums of squares of the checkpoint's values, and of the error."""
        return self.target.energies
