"""The bytes that a model's weights will take, before any of them is read.

Owns the counting: the model is built without memory, and of each quantized layer a few random rows are packed as the
whole layer will be.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from llm.base.construction import constructing_for
from llm.engine.boundary import ModelCost, RunnerPlan
from llm.errors import ValidationError
from llm.layers.parallel import SINGLE
from llm.loading.loader import stored_as
from llm.models.interface import BuildOptions
from llm.platforms import Platform
from llm.quantization.base import QuantizationConfig
from llm.quantization.configs.online import RECIPES, OnlineConfig
from llm.quantization.schemes.method import IntegerMethod
from llm.quantization.storage.streamed import StreamedStorage
from llm.runner.cost import count_model

# Rows that are packed for a layer's bytes per row; a multiple of every kernel's tile.
_ROWS = 64


class ModelSizes:
    """Bytes of the weights of an unquantized checkpoint, as they are or quantized while they are read."""

    def __init__(self, plan: RunnerPlan, platform: Platform) -> None:
        self._plan = plan
        self._platform = platform
        with torch.device("meta"), self._constructing():
            self._model: nn.Module = plan.model_class(plan.architecture, self._options())
        self._sampled: dict[tuple[object, ...], tuple[float, int]] = {}

    def cost(self) -> ModelCost:
        """Of the model as it is stored."""
        return count_model(self._model, self._plan.config.cache_config.kv_cache_dtype, self._plan.kv_cache_specs)

    def by_scheme(self) -> dict[str, int]:
        """Bytes by the names of `quantization=`; "none": as they are stored."""
        found = {"none": self.weight_bytes(None)}
        for name in RECIPES:
            if name != "w8a8_static":  # takes what w8a8 takes, and needs texts
                found[name] = self.weight_bytes(OnlineConfig.parse(name))
        return found

    def weight_bytes(self, config: QuantizationConfig | None) -> int:
        """Raises `ValidationError` for a layer that the config cannot quantize."""
        if config is not None:
            config.packed_modules_mapping = getattr(self._plan.model_class, "packed_modules_mapping", {})
        total = 0
        counted: set[int] = set()
        with self._constructing():
            for name, module in self._model.named_modules():
                own = [item for item in module.parameters(recurse=False) if id(item) not in counted]
                counted.update(map(id, own))
                kind = getattr(module, "quant_kind", "")
                method = None
                if config is not None and kind and own:
                    method = config.get_quant_method(module, getattr(module, "prefix", "") or name)
                if isinstance(method, IntegerMethod) and isinstance(method.storage, StreamedStorage):
                    total += self._packed(method, method.storage, own[0]) + self._floats(module, own[1:])
                else:
                    total += self._floats(module, own)
        return total

    def _floats(self, module: nn.Module, parameters: list[nn.Parameter]) -> int:
        """As the loader stores them: matrices in the type asked for, biases of matrices in float32."""
        bias = getattr(module, "bias", None) if hasattr(module, "quant_kind") else None
        return sum(
            item.numel() * (4 if item is bias else stored_as(item.dtype, item.dim(), self._plan.store_as).itemsize)
            for item in parameters
        )

    def _packed(self, method: IntegerMethod, storage: StreamedStorage, weight: torch.Tensor) -> int:
        rows, columns = weight.shape
        key = (method.scheme, type(storage), storage.bits, storage.group_size, columns, min(rows, _ROWS))
        if key not in self._sampled:
            self._sampled[key] = _sample(method, min(rows, _ROWS), columns, self._plan.config.model_config.weight_dtype)
        per_row, once = self._sampled[key]
        return round(per_row * rows) + once

    def _constructing(self) -> AbstractContextManager[None]:
        return constructing_for(self._platform, self._plan.config.compilation_config)

    def _options(self) -> BuildOptions:
        return replace(self._plan.build_options(SINGLE), quant_config=None)


def _sample(method: IntegerMethod, rows: int, columns: int, dtype: torch.dtype) -> tuple[float, int]:
    """(bytes per row, bytes whatever the rows) of a packed weight of random rows."""
    layer: Any = nn.Module()
    method.create_weights(layer, columns, [rows], columns, rows, torch.float32, weight_loader=_loaded_elsewhere)
    # In the checkpoint's type: scales that are exact in 16 bits are held in 16.
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype)
    layer.weight.weight_loader(layer.weight, values)
    parts = {name: part.nbytes for name, part in layer.packed_weight.memory().items() if part is not None}
    once = parts.pop("weight_table", 0) + parts.pop("weight_columns", 0)
    return sum(parts.values()) / rows, once


def _loaded_elsewhere(param: nn.Parameter, loaded: torch.Tensor, shard_id: object = None) -> int:
    raise ValidationError("this storage is filled by another loader.")
