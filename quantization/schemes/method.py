"""The quant method of all integer schemes.

It gets a layer's integers from a `WeightStorage`, packs them once for the kernel, and calls the GEMM or the embedding.
It never sees a file and never computes with a dequantized weight.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from llm.base.construction import construction
from llm.errors import CheckpointError
from llm.kernels.select import backend_of_construction
from llm.kernels.weight import Weight
from llm.quantization.base import EmbeddingMethodBase, PackedLinearMethod, WeightLoader
from llm.quantization.quantizer import IntegerWeight
from llm.quantization.schemes.table import Scheme
from llm.quantization.storage.base import WeightStorage


class IntegerMethod(PackedLinearMethod, EmbeddingMethodBase):
    """An integer weight [N, K] with scales, for linear layers and for embedding tables.

    After loading, the layer has `packed_weight`, a `Weight` of the backend. Its tensors are buffers of the layer, so
    that code that counts or frees the model's memory sees them.

    Args:
        scheme: the types of weight and activations.
        storage: the storage of this layer.
        source: what chose the scheme.
        reason: why this layer got it.
    """

    def __init__(self, scheme: Scheme, storage: WeightStorage, source: str = "", reason: str = "") -> None:
        self._scheme = scheme
        self.scheme = scheme.name
        self.storage = storage
        self.holds_bias = storage.holds_bias
        self.source = source
        self.reason = reason
        backend, platform = backend_of_construction(), construction().platform
        self._device = torch.device("cpu") if platform is None else platform.device
        self._pack = backend.op("pack")
        self._keep = construction().weights.keep
        self.linear = backend.op("linear")
        self._embedding = backend.op("embedding")
        self.invariant = backend.computes("linear")
        self.kernel = backend.source("linear")

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
                bias.data = bias.data.float()  # as the kernels read it: converted once, not in every step
        except ValueError as error:
            raise _named(layer, error) from error

    def take_dequantized(self, layer: nn.Module) -> torch.Tensor:
        """The loaded weight, float32 [N, K], in the place of `process_weights_after_loading`: nothing is packed."""
        try:
            weight = self.storage.read(layer)
            self.storage.remove(layer)
            if weight is None:
                raise CheckpointError("its integers are packed while they are read.")
            self._scheme.check(weight)
        except ValueError as error:
            raise _named(layer, error) from error
        return weight.dequantize()

    def computes(self, weight: IntegerWeight) -> bool:
        """Whether it can take this weight as it is."""
        try:
            self._scheme.check(weight)
        except CheckpointError:
            return False
        return True

    def embedding(self, layer: Any, token_ids: torch.Tensor) -> torch.Tensor:
        return self._embedding(token_ids, layer.packed_weight)

    def dequantize_weight(self, layer: Any) -> torch.Tensor:
        return layer.packed_weight.dequantize()

    def integers(self, layer: Any) -> IntegerWeight:
        """The layer's integers and scales, unpacked exactly from the kernel's layout."""
        weight: Weight = layer.packed_weight
        zero = None if weight.zero is None else weight.zero.float()
        bits = self._scheme.bits
        found = IntegerWeight(weight.unpack(), weight.scales.float(), weight.group_size, bits, zero, table=weight.table)
        found.columns, found.rotation = weight.columns, weight.rotation
        if weight.levels is not None:
            found.levels = weight.level_rows(0, weight.n)
        if weight.minimum is not None:
            found.minimum = weight.minimum.float()
        if self._scheme.static:
            found.input_scale, found.input_offset = weight.input_scale, weight.input_offset
        return found

    def _take(self, layer: Any, weight: IntegerWeight) -> None:
        self._scheme.check(weight)
        if self.storage.note:
            self.reason, self.told = f"{self.storage.note}: {self.reason}", self.storage.note
        weight = weight.to(self._device)
        bits: Weight = self._pack(weight.q, self._scheme.kind)
        scaled = bits.scaled(
            *(weight.scale, weight.zero, weight.group_size, weight.minimum, weight.columns, weight.rotation),
            weight.levels,
        )
        scaled = self._kept(layer, replace(scaled, table=weight.table))
        static = (weight.input_scale or 0.0, weight.input_offset) if self._scheme.static else (0.0, 0)
        layer.packed_weight = packed = replace(
            scaled,
            activations=self._scheme.activations,
            input_scale=static[0],
            input_offset=static[1],
        )
        for name, tensor in packed.memory().items():
            layer.register_buffer(name, tensor, persistent=False)
        if weight.bias is not None:
            layer.bias = nn.Parameter(weight.bias.float(), requires_grad=False)

    def _kept(self, layer: Any, packed: Weight) -> Weight:
        path: str = getattr(layer, "prefix", "")
        scale, zero, minimum, levels = (
            None if part is None else self._keep(path, part)
            for part in (packed.scale, packed.zero, packed.minimum, packed.levels)
        )
        data = self._keep(path, packed.data)
        return replace(packed, data=data, scale=scale, zero=zero, minimum=minimum, levels=levels)


def _named(layer: nn.Module, error: ValueError) -> CheckpointError:
    return CheckpointError(f"{getattr(layer, 'prefix', 'a layer')}: {str(error).removesuffix('.')}.")
