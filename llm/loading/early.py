"""Packing a layer as soon as it is loaded, so that its weights can leave memory before the next ones come.

Owns knowing when a layer's last parameter is filled.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from llm.quantization.base import PackedLinearMethod


@dataclass(eq=False)
class _Layer:
    """A layer, its parameters by name, and the names of those that are not filled yet."""

    module: nn.Module
    parameters: Mapping[str, nn.Parameter]
    awaited: set[str]


class EarlyPacking:
    """Calls `process_weights_after_loading` of each layer when its last parameter is filled.

    Other layers than those with a packed GEMM may read more than their own parameters, and wait for the end of loading.

    Args:
        expected: names of parameters that will be filled; those that are not optional need not be among them.

    Attributes:
        packed: the layers that were packed.
    """

    def __init__(self, model: nn.Module, expected: Collection[str]) -> None:
        self.packed: set[nn.Module] = set()
        self._layers: dict[str, _Layer] = {}
        for path, module in model.named_modules():
            if isinstance(getattr(module, "quant_method", None), PackedLinearMethod):
                own = {f"{path}.{leaf}": parameter for leaf, parameter in module.named_parameters(recurse=False)}
                awaited = {
                    name for name, each in own.items() if name in expected or not getattr(each, "optional", False)
                }
                self._layers |= dict.fromkeys(own, _Layer(module, own, awaited))

    def filled(self, name: str, elements: Mapping[str, int]) -> None:
        """The parameter `name` is filled; `elements`: how many of each are loaded."""
        layer = self._layers.get(name)
        if layer is None or name not in layer.awaited:
            return
        layer.awaited.remove(name)
        if layer.awaited:
            return
        for own, parameter in layer.parameters.items():
            parameter.elements_loaded = elements.get(own, 0)  # type: ignore[attr-defined]
        layer.module.quant_method.process_weights_after_loading(layer.module)  # type: ignore[operator, union-attr]
        self.packed.add(layer.module)
        left = set(map(id, layer.module.parameters(recurse=False)))
        for parameter in layer.parameters.values():
            if id(parameter) not in left and not parameter.is_meta:
                parameter.data = torch.empty(0, dtype=parameter.dtype)  # the loader refers to it until the end
