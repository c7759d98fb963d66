"""Float weights that are quantized while they are loaded.

Each checkpoint tensor is quantized directly from the file's memory map into its rows of the integer weight; no float
copy is made. The weight is packed for the kernel as soon as its last row is loaded.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from llm.base.construction import construction
from llm.quantization.base import WeightLoader
from llm.quantization.quantizer import IntegerWeight, decibels, quantize_weight, static_activation
from llm.quantization.storage.base import Ready, WeightStorage


@dataclass
class ActivationStatistics:
    """Statistics of a layer's inputs during calibration.

    Attributes:
        low, high: the smallest and the largest value.
        moments: mean of x x^T for runs of at most 512 input channels, float32 [B, B] each.
        rows: number of tokens of this layer; the other fields may be of all experts of a layer together.
    """

    low: float
    high: float
    moments: list[torch.Tensor]
    rows: int = 1


class QuantizeOnLoad(WeightStorage):
    """A weight stored as float [N, K].

    Args:
        bits: 8 (rounding to nearest) or 4 (with a search for the best clipping).
        group_size: columns that share a scale; must divide K.
        statistics: of the layer's inputs; they weight the errors of 4-bit weights.
        static_input: fix the activations' scale and offset from `statistics`.

    Attributes:
        signal_to_noise: of the integers against the float weight, in decibels; valid after loading.
    """

    on_load = True

    def __init__(
        self,
        bits: int,
        group_size: int,
        statistics: ActivationStatistics | None = None,
        static_input: bool = False,
    ) -> None:
        super().__init__()
        self.bits = bits
        self.group_size = group_size
        self.statistics = statistics
        self.static_input = static_input
        self.search = bits <= 4
        self._signal = self._noise = 0.0
        self._rows_loaded = 0

    def create(
        self, layer: nn.Module, sizes: list[int], columns: int, dtype: torch.dtype, loader: WeightLoader, ready: Ready
    ) -> None:
        self._sizes = sizes
        self._columns = columns
        self._shard_ids: tuple[Any, ...] = tuple(getattr(layer, "shard_ids", ()))
        self._ready = ready
        self._platform = construction().platform
        self._q: torch.Tensor | None = None
        data = torch.empty(sum(sizes), columns, dtype=dtype, device="meta")
        self.add(layer, "weight", data, self._load, output_dim=0, input_dim=1)

    def read(self, layer: nn.Module) -> IntegerWeight | None:
        return None

    @property
    def signal_to_noise(self) -> float:
        return decibels(*self.energies)

    @property
    def energies(self) -> tuple[float, float]:
        """The sums of squares of the weight, and of its error."""
        return self._signal, self._noise

    def _load(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: Any = None) -> int:
        start, rows = self._rows(shard_id)
        if loaded.shape != (rows, self._columns):
            raise ValueError(f"has shape {list(loaded.shape)}, the model needs {[rows, self._columns]}")
        if self._q is None:
            self._q = scratch(sum(self._sizes), self._columns)
            self._scale = torch.empty(sum(self._sizes), self._columns // self.group_size)
        moments = self.statistics.moments if self.statistics and self.search else None
        part = slice(start, start + rows)
        result = quantize_weight(loaded, self.bits, self.group_size, search=self.search, moments=moments)
        self._q[part], self._scale[part] = result.q, result.scale
        self._signal += result.signal
        self._noise += result.noise
        self._rows_loaded += rows
        if self._rows_loaded == sum(self._sizes):
            self._finish()
        return loaded.numel()

    def _rows(self, shard_id: Any) -> tuple[int, int]:
        if shard_id is None:
            return 0, sum(self._sizes)
        index = self._shard_ids.index(shard_id)
        return sum(self._sizes[:index]), self._sizes[index]

    def _finish(self) -> None:
        q, self._q = self._q, None
        if q is None:
            raise ValueError("is loaded twice")
        weight = IntegerWeight(q, self._scale, self.group_size, self.bits)
        if self.static_input and self.statistics is not None:
            weight.input_scale, weight.input_offset = static_activation(self.statistics.low, self.statistics.high)
        self._ready(weight)
        del q, weight
        if self._platform is not None:
            self._platform.release_memory()  # temporaries of quantizing and packing


def scratch(rows: int, columns: int) -> torch.Tensor:
    """int8 [rows, columns] from mmap, which is unmapped when it is freed.

    Temporaries from the heap, between packed weights, would leave holes that are never reused.
    """
    memory = mmap.mmap(-1, max(1, rows * columns), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.int8)[: rows * columns].view(rows, columns)
