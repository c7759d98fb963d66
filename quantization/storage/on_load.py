"""Float weights that are quantized while they are loaded.

Each checkpoint tensor is quantized directly from the file's memory map into its rows of the integer weight; no float
copy is made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from llm.kernels.reference.quantize_forms import HAVE_MINIMA, HAVE_ZEROS, Parts
from llm.kernels.select import backend_of_construction
from llm.quantization.quantizer import (
    IntegerWeight,
    Quantized,
    decibels,
    quantize_weight,
    quantize_weight_as,
    quantize_with_feedback,
    static_activation,
)
from llm.quantization.storage.streamed import StreamedStorage
from llm.quantization.tables import doubled_fp4, nf4

# The forms of plain integers: symmetric ones, those with a zero point, and those on two levels of scales.
INTEGERS = ("", "asymmetric", "two_levels")
# Of the forms whose codes are no integers.
_TABLES = {"mxfp4": doubled_fp4, "nf4": nf4}


@dataclass
class ActivationStatistics:
    """Statistics of a layer's inputs during calibration.

    Attributes:
        low, high: the smallest and the largest value.
        moments: mean of x x^T for runs of at most 1024 input channels, float32 [B, B] each.
        rows: number of tokens of this layer; the other fields may be of all experts of a layer together.
    """

    low: float
    high: float
    moments: list[torch.Tensor]
    rows: int = 1


class QuantizeOnLoad(StreamedStorage):
    """A weight stored as float [N, K].

    Args:
        bits: 8 (rounding to nearest) or 4 (integers: with a search for the best clipping).
        group_size: columns that share a scale; must divide K.
        statistics: of the layer's inputs; they weight the errors of 4-bit weights.
        static_input: fix the activations' scale and offset from `statistics`.
        form: of `quantize_weight_as`; "": symmetric integers.
        rotation: of integers of 8 bits, also by two levels: the block of columns in which the weight is rotated first;
            0: none.

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
        form: str = "",
        rotation: int = 0,
    ) -> None:
        super().__init__(bits, group_size, form in HAVE_MINIMA)
        self.form = form
        self.rotation = rotation
        self.statistics = statistics
        self.static_input = static_input
        self.search = bits <= 4
        backend = backend_of_construction()
        self._pack, self._look_up = backend.op("pack"), backend.op("embedding")
        self._to_integers, self._to_form = backend.op("quantize_weight"), backend.op("quantize_weight_as")
        self._signal = self._noise = 0.0

    @property
    def compensates(self) -> bool:
        """Whether rounding errors are fed back by what calibration showed."""
        return bool(self.statistics) and self.search and self.form in INTEGERS

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
        third = next((part for part in (weight.zero, weight.minimum, weight.levels) if part is not None), None)
        result = self.quantized(loaded, (q, scale, None if third is None else third[rows]))
        if result.q is not q:
            q.copy_(result.q)
            scale.copy_(result.scale)
            if third is not None and result.minimum is not None:
                third[rows] = result.minimum
        self._signal += result.signal
        self._noise += result.noise

    def quantized(self, loaded: torch.Tensor, out: Parts) -> Quantized:
        """`out`: q, scale, and minimum or zero point of these rows; the result's may be others."""
        if self.statistics and self.compensates:
            return quantize_with_feedback(
                *(loaded, self.bits, self.group_size, self.statistics.moments), form=self.form, rotation=self.rotation
            )
        if self.form:
            return quantize_weight_as(
                *(loaded, self.form, self.group_size), kernel=self._to_form, out=out, rotation=self.rotation
            )
        return quantize_weight(
            loaded,
            self.bits,
            self.group_size,
            search=self.search,
            kernel=self._to_integers,
            out=out[:2],
            rotation=self.rotation,
        )

    def again(self, weight: IntegerWeight) -> IntegerWeight:
        """The values of a quantized weight, quantized as a checkpoint's are."""
        values = self._values_of(weight)
        self._sizes, self._columns = [len(values)], values.shape[1]
        found = self._allocated()
        self.fill(found, slice(0, len(values)), values, 0)
        found.bias = weight.bias
        return found

    def _values_of(self, weight: IntegerWeight) -> torch.Tensor:
        """`weight.dequantize()`: all rows of an embedding table, where its columns are in order."""
        if weight.columns is not None or weight.levels is not None:
            return weight.dequantize()
        kind = "float8" if weight.q.is_floating_point() else "int4" if weight.bits <= 4 else "int8"
        packed = self._pack(weight.q, kind).scaled(
            weight.scale, weight.zero, weight.group_size, weight.minimum, rotation=weight.rotation
        )
        values: torch.Tensor = self._look_up(torch.arange(packed.n), replace(packed, table=weight.table))
        return values

    def _allocated(self) -> IntegerWeight:
        weight = super()._allocated()
        weight.rotation = self.rotation
        if self.form in HAVE_ZEROS:
            weight.zero = torch.empty_like(weight.scale)
        if self.form == "two_levels":
            weight.levels = torch.empty(weight.scale.shape, dtype=torch.uint8)
            weight.scale = torch.empty(len(weight.q), 1)
        if self.form == "float8":
            weight.q = weight.q.view(torch.float8_e4m3fn)
        if self.form in _TABLES:
            weight.table = _TABLES[self.form]()
        return weight

    def finish(self, weight: IntegerWeight) -> None:
        if self.static_input and self.statistics is not None:
            weight.input_scale, weight.input_offset = static_activation(self.statistics.low, self.statistics.high)
