"""The schemes: a table of their types of weight and activations, their layers and checks, and the method of them all.

W and A are bits: W8A8 multiplies int8 by int8. The 16 of W8A16 means that activations are not quantized: they are
float32 on a CPU, which GEMMs round as those of unquantized weights (`Construction.may_round`). FP8 says that 8 bits are
a float, e4m3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from llm.base.construction import construction
from llm.errors import CheckpointError
from llm.kernels.select import backend_of_construction
from llm.kernels.weight import Weight, is_exact_in_bf16
from llm.quantization.base import EmbeddingMethodBase, PackedLinearMethod, WeightLoader, outputs_of
from llm.quantization.quantizer import IntegerWeight
from llm.quantization.storage import WeightStorage


@dataclass(frozen=True)
class Scheme:
    """How a layer with quantized weights computes.

    Attributes:
        name: as ModelSlim's description files spell it.
        kind: of the weight, "int8", "int4" or "float8" (`llm.kernels.weight.SCALED_KINDS`).
        activations: what the GEMM converts activations to (`llm.kernels.weight.ACTIVATIONS`).
        static: activations have one scale and offset per layer; else one scale per token.
        layers: the kinds of layers it supports.
        checks: requirements on a weight; each raises `CheckpointError`.
    """

    name: str
    kind: str
    activations: str
    checks: tuple[Callable[[Scheme, IntegerWeight], None], ...] = ()
    static: bool = False
    layers: tuple[str, ...] = ("linear",)

    @property
    def bits(self) -> int:
        return 4 if self.kind == "int4" else 8

    def check(self, weight: IntegerWeight) -> None:
        """Raise `CheckpointError` for a weight that the scheme does not support."""
        if weight.bits > self.bits:
            raise CheckpointError(f"{weight.bits}-bit weights do not fit the {self.name} kernel.")
        for check in self.checks:
            check(self, weight)


def _one_scale_per_row(scheme: Scheme, weight: IntegerWeight) -> None:
    """The int32 sum over all of K is scaled once: no groups along K, no zero points."""
    if weight.groups != 1 or weight.zero is not None or weight.minimum is not None:
        raise CheckpointError(
            f"{scheme.name} computes symmetric weights with one scale per row; this layer has groups of "
            f"{weight.group_size}{' and zero points' if weight.zero is not None else ''}."
        )


def _integers(scheme: Scheme, weight: IntegerWeight) -> None:
    if weight.table is not None:
        raise CheckpointError(f"{scheme.name} computes integers; this layer has values of a table.")
    if weight.groups > 1 and weight.group_size % 8:
        size = weight.group_size
        raise CheckpointError(
            f"{scheme.name} computes groups of a multiple of 8 columns; this layer has groups of {size}."
        )


def _static_input(scheme: Scheme, weight: IntegerWeight) -> None:
    if weight.input_scale is None or not weight.input_scale > 0:
        raise CheckpointError(f"{scheme.name} needs a positive input scale, got {weight.input_scale}.")
    if not -128 <= weight.input_offset <= 127:
        raise CheckpointError(f"{scheme.name} needs an input offset in [-128, 127], got {weight.input_offset}.")


_TABLES = ("linear", "embedding")
# Of w4a8 on two levels, which a checkpoint of its values does not say: a larger one is of several of the first.
_LEVELLED_GROUPS = (32, 16)

SCHEMES = {
    row.name: row
    for row in (
        Scheme("W8A8_DYNAMIC", "int8", "int8", (_one_scale_per_row,), layers=_TABLES),
        # ModelSlim's PDMIX: static on the decode machines of a disaggregated deployment, dynamic elsewhere, as here.
        Scheme("W8A8_MIX", "int8", "int8", (_one_scale_per_row,)),
        Scheme("W8A8", "int8", "int8", (_one_scale_per_row, _static_input), static=True),
        # vllm-ascend does not quantize activations in linear layers; we do, as the name says and as vllm-ascend does in
        # mixture-of-experts layers.
        Scheme("W4A8_DYNAMIC", "int4", "int8", (_integers,)),
        Scheme("W8A16", "int8", "float", layers=_TABLES),
        Scheme("W4A16", "int4", "float"),
        Scheme("W8A16_FP8", "float8", "float", layers=_TABLES),
    )
}


class IntegerMethod(PackedLinearMethod, EmbeddingMethodBase):
    """A weight [N, K] with scales in any scheme, for linear layers and for embedding tables.

    It gets a layer's integers from a `WeightStorage`, packs them once for the kernel, and calls the GEMM or the
    embedding. It never sees a file and never computes with a dequantized weight.

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
        self._ops = backend.ops
        self._rounded = backend.rounds_bf16_inputs if construction().may_round else frozenset()
        self._keep = construction().weights.keep
        self.linear = backend.ops.linear
        self.invariant = backend.computes("linear")
        self.kernel = backend.source("linear")

    def create(
        self, layer: nn.Module, sizes: list[int], columns: int, dtype: torch.dtype, loader: WeightLoader
    ) -> None:
        self.storage.create(layer, sizes, columns, dtype, loader, lambda weight: self._take(layer, weight))

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
        return self._ops.embedding(token_ids, layer.packed_weight)

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
        weight = self._smaller(layer, weight)
        if self.storage.note:
            self.reason, self.summary = f"{self.storage.note}: {self.reason}", self.storage.note
        weight = weight.to(self._device)
        bits: Weight = self._ops.pack(weight.q, self._scheme.kind)
        scaled = bits.scaled(
            *(weight.scale, weight.zero, weight.group_size, weight.minimum, weight.columns, weight.rotation),
            weight.levels,
        )
        scaled = self._kept(layer, replace(scaled, table=weight.table))
        static = (weight.input_scale or 0.0, weight.input_offset) if self._scheme.static else (0.0, 0)
        layer.packed_weight = packed = replace(
            scaled,
            activations=self._activations(weight),
            input_scale=static[0],
            input_offset=static[1],
            outputs=outputs_of(layer),
        )
        for name, tensor in packed.memory().items():
            layer.register_buffer(name, tensor, persistent=False)
        if weight.bias is not None:
            layer.bias = nn.Parameter(weight.bias.float(), requires_grad=False)

    def _activations(self, weight: IntegerWeight) -> str:
        found = self._scheme.activations
        rounds = found == "float" and self._scheme.kind in self._rounded and is_exact_in_bf16(weight.table)
        return "bfloat16" if rounds else found

    def _smaller(self, layer: Any, weight: IntegerWeight) -> IntegerWeight:
        """A checkpoint's rotated integers of 8 bits that are codes of 4 bits on two levels of scales, as those.

        So w4a8 is saved. Products are of the same integers, so answers are the same bit for bit.
        """
        if self.scheme != "W8A8_DYNAMIC" or not weight.rotation or self.storage.on_load or layer.quant_kind != "linear":
            return weight
        for size in _LEVELLED_GROUPS:
            found = weight.on_levels(size) if weight.q.shape[1] % size == 0 else None
            if found is not None:
                self._scheme = SCHEMES["W4A8_DYNAMIC"]
                self.scheme = self._scheme.name
                self.reason = f"{self.reason}, held as codes of 4 bits on two levels of scales"
                self.summary = "held in 4 bits, as they fit"
                return found
        return weight

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
