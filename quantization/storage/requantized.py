"""A quantized checkpoint's weights, quantized again while they are loaded.

Codes of 4 bits are not rounded to 4 bits a second time where the asked scheme computes them as they are stored.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from llm.quantization.base import WeightLoader
from llm.quantization.quantizer import IntegerWeight
from llm.quantization.storage.base import Ready, WeightStorage
from llm.quantization.storage.on_load import QuantizeOnLoad


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
