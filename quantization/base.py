"""The protocol between a layer and the way its weights are stored.

A layer calls `create_weights` when it is constructed. The loader copies checkpoint tensors in through each parameter's
`weight_loader`. `process_weights_after_loading` packs them once for the kernel. `apply` computes. A method knows a
layer by `layer.quant_kind`, never by its class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from llm.base.watch import Counted
from llm.kernels.weight import Weight

# weight_loader(param, loaded, shard_id): copies one checkpoint tensor into the parameter, or into its rows for
# `shard_id` ("q", "k", "v", 0, 1 ...; None: all rows), and returns how many elements it filled.
WeightLoader = Callable[[nn.Parameter, torch.Tensor, Any], int]


class QuantizeMethodBase(Counted, ABC):
    """How one layer stores its weights and computes with them.

    Attributes:
        scheme: the arithmetic, e.g. "W8A8_DYNAMIC"; "" for unquantized.
        source: what chose it, e.g. "quant_model_description.json".
        reason: why this layer got it, in a few words.
        summary: what `llm.config` says of it, which says so for all layers of which it is the same; "": nothing.
        kernel: what computes it, e.g. "cpu kernel avx512_vnni" or "PyTorch"; "" if unknown.
        invariant: True if the bits of a token do not depend on the rest of the batch; see `EngineConfig.invariant`.
    """

    invariant: bool = False
    scheme: str = ""
    source: str = ""
    reason: str = ""
    summary: str = ""
    kernel: str = ""

    @abstractmethod
    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Register empty parameters on `layer`, each with `output_dim`, `input_dim` and `weight_loader` attributes.

        Further attributes of a parameter that loaders read: `packed_dim` and `packed_factor` (an element along that
        dimension holds this many values), `shard_slots` (one entry per fused shard along dimension 0), `optional` (a
        checkpoint may lack it; it then keeps its value).
        """

    @abstractmethod
    def apply(self, layer: nn.Module, *args: Any) -> torch.Tensor:
        """Compute the layer."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Pack the loaded weights for the kernel; called once. Does nothing by default."""

    def dequantize_weight(self, layer: nn.Module) -> torch.Tensor:
        """The weight as float32 [N, K], for adapters and saving."""
        raise NotImplementedError(f"{type(self).__name__} cannot give its weight back")


def outputs_of(layer: nn.Module) -> int:
    """Rows of the layer's whole weight, for `Weight.outputs`; 0: those that it has."""
    outputs = getattr(layer, "output_size", 0)
    return outputs if isinstance(outputs, int) else 0


class LinearMethodBase(QuantizeMethodBase):
    """For layers with `quant_kind == "linear"`: y = x W^T + bias.

    Attributes:
        linear: the backend's operation that computes y from x and a `Weight`; see `PackedLinearMethod`.
    """

    linear: Callable[[torch.Tensor, Weight], torch.Tensor] | None = None

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
        self.create(layer, output_partition_sizes, input_size_per_partition, params_dtype, weight_loader)

    def create(
        self, layer: nn.Module, sizes: list[int], columns: int, dtype: torch.dtype, loader: WeightLoader
    ) -> None:
        """As `create_weights`, of which a subclass overrides one: a weight [sum(sizes), columns]."""
        raise NotImplementedError(f"{type(self).__name__} has no create_weights")

    @abstractmethod
    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x float [..., K] -> float [..., N]."""


class PackedLinearMethod(LinearMethodBase):
    """One GEMM with the layer's `packed_weight`, a `Weight`.

    A linear layer calls `linear` directly unless `apply` is overridden or patched.
    """

    linear: Callable[[torch.Tensor, Weight], torch.Tensor]

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.linear(x, self.weight_with(layer, bias))

    def weight_with(self, layer: Any, bias: torch.Tensor | None) -> Weight:
        """The layer's weight with `bias`; a new `Weight` is made only if the bias is not yet the weight's."""
        weight: Weight = layer.packed_weight
        if weight.bias is not bias:
            layer.packed_weight = weight = replace(weight, bias=bias)
        return weight


class EmbeddingMethodBase(LinearMethodBase):
    """For layers with `quant_kind == "embedding"`: a table that is read by id and, if tied, is also the LM head."""

    @abstractmethod
    def embedding(self, layer: nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
        """ids int64 [N] -> float [N, H]."""


class KVCacheMethod(QuantizeMethodBase):
    """For attention layers (`quant_kind == "attention"`): the scales of a quantized KV cache.

    `create_weights(layer)` registers them. `apply` is never called: attention reads the processed scales.
    """

    def apply(self, layer: nn.Module, *args: Any) -> torch.Tensor:
        raise NotImplementedError("attention computes; a KV cache method only holds scales")


class FusedMoEMethodBase(QuantizeMethodBase):
    """For mixture-of-experts layers (`quant_kind == "moe"`): all experts' weights, stacked.

    `w13` holds gate then up, [E, 2I, H]; `w2` holds down, [E, H, I].
    """

    @abstractmethod
    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        *,
        weight_loader: WeightLoader,
    ) -> None:
        """Register `w13_*` and `w2_*` parameters."""

    @abstractmethod
    def apply(
        self, layer: nn.Module, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        """x float [M, H], weights float [M, k] and expert ids [M, k] of each token -> float [M, H]."""


@dataclass(frozen=True)
class StaticCache:
    """A KV cache of `dtype` whose scales are in the checkpoint.

    Attributes:
        source: where the checkpoint says so, for reasons.
        tensors: "k_scale", "v_scale" and with offsets "k_offset", "v_offset" -> the tensor's name below the module that
            the attention layer is a part of.
        is_default: kv_cache_dtype="auto" means it.
    """

    dtype: torch.dtype
    source: str
    tensors: Mapping[str, str]
    is_default: bool = True


class QuantizationConfig(ABC):
    """What a checkpoint format says about its layers; chooses a method per layer and computes nothing.

    Attributes:
        packed_modules_mapping: fused module name -> the checkpoint's names; set from the model class.
        file_decides: a file of `get_config_filenames` counts for more than config.json's `quantization_config`.
        static_cache: the quantized KV cache whose scales the checkpoint has; None: it has none.
        summary: what `llm.config` says of all layers; "": nothing.
    """

    packed_modules_mapping: Mapping[str, list[str]] = {}
    static_cache: StaticCache | None = None
    summary: str = ""
    file_decides: ClassVar[bool] = False
    _to_checkpoint: Callable[[str], str] | None = None

    @abstractmethod
    def get_name(self) -> str:
        """The name that a user passes as `quantization=`."""

    @abstractmethod
    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method for the layer at `prefix` (dotted path); None: leave it unquantized."""

    def has_four_bits(self) -> bool:
        """Whether a checkpoint stores linear layers in at most 4 bits, so that those with more have them on purpose."""
        return False

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        """Construct from the checkpoint's quantization config, {} if it has none."""
        return cls()

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Activation dtypes it supports; start-up refuses others. On a CPU activations are float32."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Least compute capability, 10 * major + minor, of devices that have one; 0: none needed."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """File names in a model folder; the first that exists is passed to `from_config`."""
        return []

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Mapping[str, Any], user_quant: str | None) -> str | None:
        """This config's name if it handles a checkpoint with this `quantization_config` (empty if none), else None."""
        return None

    def maybe_update_config(self, model: str, hf_config: Mapping[str, Any]) -> None:
        """Called once with the model's folder and config.json, before the model is built."""

    def apply_mapper(self, to_checkpoint: Callable[[str], str]) -> None:
        """Called before the model is built; `to_checkpoint` maps the model's module paths to the checkpoint's."""
        self._to_checkpoint = to_checkpoint

    def checkpoint_names(self, prefix: str) -> list[str]:
        """The checkpoint's names of the layer at `prefix`: of its shards, if it is fused."""
        path, _, last = prefix.rpartition(".")
        names = [f"{path}.{part}" if path else part for part in self.packed_modules_mapping.get(last, [last])]
        return names if self._to_checkpoint is None else [self._to_checkpoint(name) for name in names]

    def computed_with(self) -> Mapping[str, str]:
        """Type of tensors -> how many there are and what computes them; empty: `llm.explain()` alone says."""
        return {}

    def share_bits(self, construct: Callable[[], object]) -> None:
        """Called before the model is built, on every rank; `construct` makes it with this config, without memory."""

    def describe_tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Called with the shapes of the checkpoint's tensors before the model is planned, and again before it is built;
        not for random weights."""

    def parameter_name(self, name: str) -> str:
        """The name that the parameter of a checkpoint's tensor has, before the model's own renames."""
        return name

    def prepare_model(self, model: nn.Module) -> None:
        """Called after the model is built and before loading: register parameters that only some checkpoints have."""

    def ignores(self, name: str) -> bool:
        """True if a checkpoint may contain the tensor `name` although no layer uses it."""
        return False

    def ignores_zeros(self, name: str) -> bool:
        """The same for a tensor whose values are all 0, such as a bias of a layer that has none."""
        return False

    def end_loading(self) -> None:
        """Called after the weights are read, or could not be."""

    def check_used(self) -> None:
        """Called after the model is built; raises `ValidationError` for settings of the user that matched no layer."""
