"""Float weights in the checkpoint's type (float32, bfloat16, float16); the arithmetic is float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from llm.base.construction import construction
from llm.errors import CheckpointError
from llm.kernels.backend import ArrivingRows
from llm.kernels.reference.linear import embedding, linear, pack
from llm.kernels.select import backend_of_construction
from llm.kernels.weight import FLOAT_KINDS, Weight
from llm.quantization.base import EmbeddingMethodBase, PackedLinearMethod, WeightLoader, outputs_of


class UnquantizedLinearMethod(PackedLinearMethod):
    """One parameter `weight` in its storage type: [N, K] while loading, then the data of `packed_weight`.

    Args:
        may_round: activations may be rounded to bfloat16 where that is faster and the model's type allows it.

    Attributes:
        packs: the weight is packed after loading, and the layer's bias then float32; PyTorch's operations read both
            as they are stored.
    """

    def __init__(self, may_round: bool = True) -> None:
        backend = backend_of_construction()
        self.invariant = backend.computes("linear")
        self.packs = any(backend.computes(name) for name in ("pack", "linear", "embedding"))
        self._ops = backend.ops
        self._arriving = backend.arriving_rows
        self.linear = linear  # until the weight is packed
        self.kernel = backend.source("linear")
        self._keep = construction().weights.keep
        self._rounded = backend.rounds_bf16_inputs if may_round and construction().may_round else frozenset()

    def create(
        self, layer: nn.Module, sizes: list[int], columns: int, dtype: torch.dtype, loader: WeightLoader
    ) -> None:
        shape = (sum(sizes), columns)
        data = torch.empty(shape, dtype=dtype, device=construction().device)
        arriving = None if data.is_meta or not self.packs else self._arriving(*shape, dtype)
        if arriving is None:
            layer.weight = new_parameter(data, loader, output_dim=0, input_dim=1)
        else:
            layer.weight = new_parameter(arriving.data, loader, output_dim=0, input_dim=1, arriving=arriving)
        # None until the weight is loaded, and always with PyTorch's operations, whose GEMMs read `weight`.
        layer.packed_weight = None  # type: ignore[assignment]

    def process_weights_after_loading(self, layer: Any) -> None:
        if layer.weight.dtype not in FLOAT_KINDS:
            stored, name = str(layer.weight.dtype).removeprefix("torch."), getattr(layer, "prefix", "") or "a layer"
            raise CheckpointError(f"{name}: the weight is stored as {stored}; convert the checkpoint to float32.")
        if not self.packs or layer.packed_weight is not None:
            return
        arriving = _arriving_rows(layer.weight)
        packed = self._ops.pack(layer.weight.data, reuse=True) if arriving is None else arriving.finish()
        data = self._keep(getattr(layer, "prefix", ""), packed.data)
        layer.weight = nn.Parameter(data, requires_grad=False)
        # The packed weight shares the parameter: freeing the parameter's memory frees it.
        activations = "bfloat16" if packed.kind in self._rounded else "float"
        layer.packed_weight = replace(packed, data=layer.weight, activations=activations, outputs=outputs_of(layer))
        self.linear = self._ops.linear
        if getattr(layer, "bias", None) is not None:
            layer.bias.data = layer.bias.data.float()

    def weight_with(self, layer: Any, bias: torch.Tensor | None) -> Weight:
        if layer.packed_weight is None:
            return replace(pack(layer.weight), bias=bias)
        return super().weight_with(layer, bias)

    def dequantize_weight(self, layer: Any) -> torch.Tensor:
        packed = layer.packed_weight
        weight = layer.weight.detach() if packed is None else packed.unpack()
        return weight.float()


class UnquantizedEmbeddingMethod(UnquantizedLinearMethod, EmbeddingMethodBase):
    """The same for an embedding table."""

    def embedding(self, layer: Any, token_ids: torch.Tensor) -> torch.Tensor:
        weight: Weight | None = layer.packed_weight
        if weight is None:
            return embedding(token_ids, pack(layer.weight))
        return self._ops.embedding(token_ids, weight)


def left_alone(kind: str, source: str, reason: str) -> UnquantizedLinearMethod:
    """The method for a layer of `kind` that a quantized model leaves unquantized; `source` and `reason` say why."""
    method = UnquantizedEmbeddingMethod() if kind == "embedding" else UnquantizedLinearMethod()
    method.source, method.reason = source, reason
    return method


def fill_rows(param: nn.Parameter, dim: int, start: int, values: torch.Tensor) -> None:
    """Copy `values` into the parameter, from `start` on along `dim`; packed at once where that is possible."""
    arriving: ArrivingRows | None = getattr(param, "arriving", None)
    if arriving is None or dim != 0 or not arriving.take(start, values):
        param.data.narrow(dim, start, values.shape[dim]).copy_(values)


def widen(param: nn.Parameter, dtype: torch.dtype) -> None:
    """Convert a parameter that is not packed yet, or in part."""
    arriving = _arriving_rows(param)
    if arriving is not None:
        arriving.release()
    param.data = param.data.to(dtype)


def _arriving_rows(param: nn.Parameter) -> ArrivingRows | None:
    """Taken from the parameter, which must not keep its memory; None where its data was replaced."""
    arriving: ArrivingRows | None = getattr(param, "arriving", None)
    if arriving is None:
        return None
    del param.arriving  # type: ignore[attr-defined]
    return arriving if arriving.data.data_ptr() == param.data_ptr() else None


def new_parameter(data: torch.Tensor, weight_loader: WeightLoader, **attributes: Any) -> nn.Parameter:
    """An inference parameter on the model's device that carries its loader and its sharding attributes."""
    return parameter_of(data.to(construction().device), weight_loader, **attributes)


def parameter_of(data: torch.Tensor, weight_loader: WeightLoader, **attributes: Any) -> nn.Parameter:
    """The same where `data` is, for tensors of a checkpoint that become others when a layer is packed."""
    param = nn.Parameter(data, requires_grad=False)
    param.weight_loader = weight_loader  # type: ignore[attr-defined]
    for name, value in attributes.items():
        setattr(param, name, value)
    return param
