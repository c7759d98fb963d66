"""The protocol between a layer and the way its weights are stored.

Owns the abstract bases. A layer calls `create_weights` when it is constructed, the loader copies checkpoint tensors in
through each parameter's `weight_loader`, `process_weights_after_loading` rearranges them once for the kernel, `apply`
computes. Does not own any scheme, and asks a layer what it is by `layer.quant_kind`, never by its class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# weight_loader(param, loaded, shard_id): copies one checkpoint tensor into the parameter, or into the rows of it that
# belong to `shard_id` ("q", "k", "v", 0, 1 ...; None: all of it), and returns how many elements it filled.
WeightLoader = Callable[[nn.Parameter, torch.Tensor, Any], int]


class QuantizeMethodBase(ABC):
    """How one layer stores its weights and computes with them."""

    @abstractmethod
    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Register empty parameters on `layer`, each with `output_dim`, `input_dim` and `weight_loader` attributes."""

    @abstractmethod
    def apply(self, layer: nn.Module, *args: Any) -> torch.Tensor:
        """Compute."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Rearrange the loaded weights for the kernel; called once. Nothing by default."""

    def dequantize_weight(self, layer: nn.Module) -> torch.Tensor:
        """The weight as float32 [N, K], for whoever needs it (adapters, saving)."""
        raise NotImplementedError(f"{type(self).__name__} cannot give its weight back")


class LinearMethodBase(QuantizeMethodBase):
    """For layers with `quant_kind == "linear"`: y = x W^T + bias."""

    @abstractmethod
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
        """Register the parameters of a weight [sum(output_partition_sizes), input_size_per_partition]."""

    @abstractmethod
    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x float [..., K] -> float [..., N]."""


class EmbeddingMethodBase(LinearMethodBase):
    """For layers with `quant_kind == "embedding"`: a table that is read by id and, tied, multiplied as the LM head."""

    @abstractmethod
    def embedding(self, layer: nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
        """ids int64 [N] -> float [N, H]."""


class QuantizationConfig(ABC):
    """What a checkpoint format says about its layers; picks a method per layer and computes nothing."""

    @abstractmethod
    def get_name(self) -> str:
        """The name a user passes as `quantization=`."""

    @abstractmethod
    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method for the layer at `prefix` (dotted path); None: leave it unquantized."""
