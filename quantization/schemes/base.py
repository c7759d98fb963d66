"""What all integer schemes share: storage in, the kernel's form out.

A scheme gets the integers of its layer from a `WeightStorage`, packs them for the kernel once, and multiplies. It never
sees a file and never makes the weight float again.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from llm.base.errors import CheckpointError
from llm.kernels.reference.quantized import dequantize
from llm.kernels.select import backend_of_construction
from llm.quantization.base import EmbeddingMethodBase, WeightLoader
from llm.quantization.quantizer import IntegerWeight
from llm.quantization.storage.base import WeightStorage


class IntegerMethod(EmbeddingMethodBase):
    """An integer weight [N, K] with scales, for linear layers and for embedding tables.

    After loading the layer has `packed_weight` (the kernel's form), `weight_scale` [N, G] and `weight_zero`: float32,
    or in 16 bits where these hold every value exactly and the kernel reads them.

    Args:
        storage: of this one layer.
        source: who asked for the scheme.
        reason: why this layer got it.
    """

    pack_op: ClassVar[str]
    linear_op: ClassVar[str]
    max_bits: ClassVar[int]
    reads_narrow_scales: ClassVar[bool] = False

    def __init__(self, storage: WeightStorage, source: str = "", reason: str = "") -> None:
        self.storage = storage
        self.holds_bias = storage.holds_bias
        self.source = source
        self.reason = reason
        self.group_size = 0
        self._scales: tuple[torch.Tensor, torch.Tensor] | None = None
        backend = backend_of_construction()
        self._pack = backend.op(self.pack_op)
        self._linear = backend.op(self.linear_op)
        self._embedding = backend.op("embedding_int8")
        self.invariant = backend.computes(self.linear_op)
        self.kernel = backend.source(self.linear_op)

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        *,
        weight_loader: WeightLoader,
    ) -> None:
        def ready(weight: IntegerWeight) -> None:
            self._take(layer, weight)

        sizes = output_partition_sizes
        self.storage.create(layer, sizes, input_size_per_partition, params_dtype, weight_loader, ready)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        try:
            weight = self.storage.read(layer)
            self.storage.remove(layer)
            if weight is not None:
                self._take(layer, weight)
            bias = getattr(layer, "bias", None)
            if bias is not None:
                bias.data = bias.data.float()  # as the kernels read it, once instead of in every step
        except ValueError as error:
            raise CheckpointError(f"{getattr(layer, 'prefix', 'a layer')}: {error}") from error

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return self._multiply(layer, rows, bias).view(*x.shape[:-1], layer.packed_weight.n)

    def embedding(self, layer: Any, token_ids: torch.Tensor) -> torch.Tensor:
        return self._embedding(token_ids, layer.packed_weight, self._row_scale(layer))

    def dequantize_weight(self, layer: Any) -> torch.Tensor:
        weight = self.integers(layer)
        return dequantize(weight.q, weight.scale, weight.zero, weight.group_size)

    def integers(self, layer: Any) -> IntegerWeight:
        """What the layer computes with, exactly, out of the kernel's form."""
        zero = None if layer.weight_zero is None else layer.weight_zero.float()
        q, scale = layer.packed_weight.unpack(), layer.weight_scale.float()
        return IntegerWeight(q, scale, self.group_size, self.max_bits, zero=zero)

    def check(self, weight: IntegerWeight) -> None:
        """Refuse what the kernel has no form for; raises `CheckpointError`."""
        if weight.bits > self.max_bits:
            raise CheckpointError(f"{weight.bits}-bit weights do not fit the {self.scheme} kernel.")

    def _take(self, layer: Any, weight: IntegerWeight) -> None:
        self.check(weight)
        if layer.quant_kind == "embedding" and (weight.scale.shape[1] > 1 or weight.zero is not None):
            raise CheckpointError("an embedding table needs one scale per row and no zero points.")
        self.group_size = weight.group_size
        packed = self._pack(weight.q)
        layer.packed_weight = packed
        # Buffers, so that whoever counts or frees the model's memory sees them.
        layer.register_buffer("packed_data", packed.data, persistent=False)
        narrow = self.reads_narrow_scales and layer.quant_kind == "linear"
        layer.register_buffer("weight_scale", _by_group(weight.scale, narrow), persistent=False)
        zero = None if weight.zero is None else _by_group(weight.zero, narrow)
        layer.register_buffer("weight_zero", zero, persistent=False)
        self._keep(weight)
        if weight.bias is not None:
            layer.bias = nn.Parameter(weight.bias.float(), requires_grad=False)

    def _keep(self, weight: IntegerWeight) -> None:
        """Keep what else the kernel needs."""

    def _row_scale(self, layer: Any) -> torch.Tensor:
        """The layer's one scale per row as [N], a view that is kept: indexing takes as long as the rest of a call."""
        scale = layer.weight_scale
        if self._scales is None or self._scales[0] is not scale:
            self._scales = scale, scale[:, 0]
        return self._scales[1]

    def _multiply(self, layer: Any, rows: Any, bias: torch.Tensor | None) -> torch.Tensor:
        """rows float32 [M, K] -> [M, N]."""
        raise NotImplementedError


def _by_group(values: torch.Tensor, narrow: bool) -> torch.Tensor:
    """[N, G] in memory group by group: kernels read 16 rows' scales of one group at once.

    `narrow`: in the first 16-bit type that loses nothing. Checkpoints have their scales in the model's own type.
    """
    values = values.float()
    for dtype in (torch.bfloat16, torch.float16) if narrow else ():
        if torch.equal(values.to(dtype).float(), values):
            values = values.to(dtype)
            break
    return values.t().contiguous().t()


def one_scale_per_row(weight: IntegerWeight, scheme: str) -> None:
    """For kernels that scale whole sums: no groups along K, no zero points."""
    if weight.scale.shape[1] != 1 or weight.zero is not None:
        raise CheckpointError(
            f"{scheme} computes symmetric weights with one scale per row; this layer has groups of "
            f"{weight.group_size}{' and zero points' if weight.zero is not None else ''}."
        )
