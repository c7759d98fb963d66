"""Float weights that are quantized while they are loaded.

Each checkpoint tensor is quantized directly from the file's memory map into its rows of the integer weight; no float
copy is made.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llm.kernels.select import backend_of_construction
from llm.quantization.block_quantizer import quantize_q4_0, quantize_q4_k, quantize_q8_0
from llm.quantization.float_quantizer import quantize_float8, quantize_mxfp4, quantize_nf4
from llm.quantization.quantizer import IntegerWeight, Quantized, decibels, quantize_weight, static_activation
from llm.quantization.storage.streamed import StreamedStorage
from llm.quantization.tables import doubled_fp4, nf4


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


class QuantizeOnLoad(StreamedStorage):
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
    minima = False

    def __init__(
        self,
        bits: int,
        group_size: int,
        statistics: ActivationStatistics | None = None,
        static_input: bool = False,
    ) -> None:
        super().__init__(bits, group_size, self.minima)
        self.statistics = statistics
        self.static_input = static_input
        self.search = bits <= 4
        self._kernel = backend_of_construction().op("quantize_weight")
        self._signal = self._noise = 0.0

    @property
    def signal_to_noise(self) -> float:
        return decibels(*self.energies)

    @property
    def energies(self) -> tuple[float, float]:
        """The sums of squares of the weight, and of its error."""
        return self._signal, self._noise

    def fill(self, weight: IntegerWeight, rows: slice, loaded: torch.Tensor, shard: int) -> None:
        shape = (rows.stop - rows.start, self._columns)
        if loaded.shape != shape:
            raise ValueError(f"has shape {list(loaded.shape)}, the model needs {list(shape)}")
        q, scale = weight.q[rows], weight.scale[rows]
        result = self.quantized(loaded, (q, scale))
        if result.q is not q:
            q.copy_(result.q)
            scale.copy_(result.scale)
        if weight.minimum is not None and result.minimum is not None:
            weight.minimum[rows] = result.minimum
        self._signal += result.signal
        self._noise += result.noise

    def quantized(self, loaded: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor]) -> Quantized:
        """`out`: q and scale of these rows, which the result may be."""
        moments = self.statistics.moments if self.statistics and self.search else None
        return quantize_weight(
            loaded, self.bits, self.group_size, search=self.search, moments=moments, kernel=self._kernel, out=out
        )

    def again(self, weight: IntegerWeight) -> IntegerWeight:
        """The values of a quantized weight, quantized as a checkpoint's are."""
        values = weight.dequantize()
        self._sizes, self._columns = [len(values)], values.shape[1]
        found = self._allocated()
        self.fill(found, slice(0, len(values)), values, 0)
        found.bias = weight.bias
        return found

    def finish(self, weight: IntegerWeight) -> None:
        if self.static_input and self.statistics is not None:
            weight.input_scale, weight.input_offset = static_activation(self.statistics.low, self.statistics.high)


class RoundToFloats(QuantizeOnLoad):
    """A weight that becomes floats of 8 bits (e4m3) or of 4 bits (e2m1, with powers of two as scales)."""

    def quantized(self, loaded: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor]) -> Quantized:
        return (quantize_float8 if self.bits == 8 else quantize_mxfp4)(loaded, self.group_size)

    def _allocated(self) -> IntegerWeight:
        weight = super()._allocated()
        if self.bits == 8:
            weight.q = weight.q.view(torch.float8_e4m3fn)
        else:
            weight.table = doubled_fp4()
        return weight


class RoundToNormal(QuantizeOnLoad):
    """A weight that becomes 4 bits of NF4."""

    def quantized(self, loaded: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor]) -> Quantized:
        return quantize_nf4(loaded, self.group_size)

    def _allocated(self) -> IntegerWeight:
        weight = super()._allocated()
        weight.table = nf4()
        return weight


class RoundToBlocks(QuantizeOnLoad):
    """A weight that becomes GGUF's Q8_0 or Q4_0: groups of 32 with scales in float16."""

    def quantized(self, loaded: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor]) -> Quantized:
        return (quantize_q8_0 if self.bits == 8 else quantize_q4_0)(loaded)


class RoundToSuperBlocks(QuantizeOnLoad):
    """A weight that becomes GGUF's Q4_K: 4 bits with minima, in blocks of 256 columns."""

    minima = True

    def quantized(self, loaded: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor]) -> Quantized:
        return quantize_q4_k(loaded)
