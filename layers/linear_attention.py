"""Gated delta nets: a short convolution, the gated delta rule and a gated norm between projections.

Families differ in what is projected together, in the decay (of a head, or of each of its key channels) and in the gate.
Classes have vLLM's names.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from llm.base.custom_op import PluggableLayer
from llm.forward import ForwardBatch
from llm.kernels.select import backend_of_construction
from llm.layers.linear import (
    ColumnParallelLinear,
    LinearArguments,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    StackedByHead,
)
from llm.layers.mamba import CausalConv1d, DecayingLayer
from llm.layers.norm import RMSNormGated
from llm.layers.parallel import SINGLE, TensorParallel
from llm.quantization.base import QuantizationConfig
from llm.quantization.unquantized import new_parameter

# Queries, keys and values [N, 2 * keys + values], the gate [N, values], decay and beta [N, heads]: all linear.
Projected = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class DeltaHeads:
    """Numbers of heads of the whole model, and channels of a head.

    Queries and keys have `key_heads`, each for heads / key_heads consecutive heads of values.
    """

    key_heads: int
    heads: int
    key_size: int
    value_size: int

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_size

    @property
    def values(self) -> int:
        return self.heads * self.value_size


def _head_parameter(count: int, tp: TensorParallel) -> nn.Parameter:
    """float32 [count / ranks], of a tensor with `count` numbers in any shape."""
    own = tp.share("heads", count)

    def load(param: nn.Parameter, loaded: torch.Tensor, shard_id: object = None) -> int:
        if loaded.numel() != count:
            raise ValueError(f"has shape {list(loaded.shape)}, the model needs {[count]}")
        param.data.copy_(loaded.flatten()[tp.rank * own : (tp.rank + 1) * own])
        return own

    return new_parameter(torch.zeros(own), load)


class GatedDeltaNetAttention(DecayingLayer):
    """float32 [N, hidden_size] -> float32 [N, hidden_size]; a subclass projects.

    Args:
        kernel_size: tokens that the convolution sees, the current one included.
        eps: of the norm of each head's output.
        layer_index: position of this layer's state among the model's.
        beta_scale: 2 allows negative eigenvalues.
        activation: of the gate, "silu" or "sigmoid".
    """

    decay_per_channel = False
    norm_name, out_name = "norm", "out_proj"

    def __init__(
        self,
        hidden_size: int,
        heads: DeltaHeads,
        kernel_size: int,
        eps: float,
        *,
        layer_index: int,
        beta_scale: float = 1.0,
        activation: str = "silu",
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        tp: TensorParallel = SINGLE,
    ) -> None:
        super().__init__()
        self.heads, self.hidden_size, self.layer_index, self.beta_scale = heads, hidden_size, layer_index, beta_scale
        self.tp, self.prefix = tp, prefix
        self._types: LinearArguments = {
            "params_dtype": params_dtype,
            "quant_config": quant_config,
            "tp": tp,
            "return_bias": False,
        }
        self.build_projections()
        self.conv1d = CausalConv1d(
            [heads.keys, heads.keys, heads.values], kernel_size, activation="silu", params_dtype=params_dtype, tp=tp
        )
        self.A_log = _head_parameter(heads.heads, tp)
        self.dt_bias = _head_parameter(heads.heads * (heads.key_size if self.decay_per_channel else 1), tp)
        norm = RMSNormGated(heads.value_size, eps, norm_before_gate=True, dtype=params_dtype, activation=activation)
        self.add_module(self.norm_name, norm)
        out = RowParallelLinear(heads.values, hidden_size, False, prefix=f"{prefix}.{self.out_name}", **self._types)
        self.add_module(self.out_name, out)
        self._ops = backend_of_construction().ops

    def build_projections(self) -> None:
        raise NotImplementedError

    def project(self, hidden: torch.Tensor) -> Projected:
        raise NotImplementedError

    def forward(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        (window, state), metadata = batch.states[self.layer_index], batch.metadata[self.layer_index]
        qkv, gate, decay, beta = self.project(hidden)
        heads, ranks = self.heads, self.tp.size
        sizes = [heads.keys // ranks, heads.keys // ranks, heads.values // ranks]
        query, key, value = self.conv1d(qkv, window, metadata).split_with_sizes(sizes, dim=-1)
        by_key, by_value = (-1, heads.key_size), (-1, heads.value_size)
        dt_bias: torch.Tensor = self.dt_bias
        if self.decay_per_channel:
            decay, dt_bias = decay.unflatten(1, by_key), dt_bias.view(by_key)
        inputs = query.unflatten(1, by_key), key.unflatten(1, by_key), value.unflatten(1, by_value), decay, beta
        constants = self.rates, dt_bias, state
        y = metadata.run(lambda rows: self._ops.gated_delta_rule(*inputs, *constants, rows, self.beta_scale))
        normed = getattr(self, self.norm_name)(y, gate.unflatten(1, by_value))
        return getattr(self, self.out_name)(normed.flatten(1))

    def column(self, name: str, size: int) -> ColumnParallelLinear:
        return ColumnParallelLinear(self.hidden_size, size, False, prefix=f"{self.prefix}.{name}", **self._types)

    def merged(self, name: str, sizes: list[int]) -> MergedColumnParallelLinear:
        return MergedColumnParallelLinear(self.hidden_size, sizes, False, prefix=f"{self.prefix}.{name}", **self._types)


@PluggableLayer.register("qwen_gated_delta_net_attention")
class QwenGatedDeltaNetAttention(GatedDeltaNetAttention):
    """Qwen3.5's: queries, keys and values in one matrix, the gate in another."""

    def build_projections(self) -> None:
        heads = self.heads
        self.in_proj_qkv = self.merged("in_proj_qkv", [heads.keys, heads.keys, heads.values])
        self.in_proj_z = self.column("in_proj_z", heads.values)
        self.in_proj_ba = self.merged("in_proj_ba", [heads.heads, heads.heads])

    def project(self, hidden: torch.Tensor) -> Projected:
        beta, decay = self.in_proj_ba(hidden).tensor_split(2, dim=-1)
        return self.in_proj_qkv(hidden), self.in_proj_z(hidden), decay, beta


class QwenNextGatedDeltaNetAttention(QwenGatedDeltaNetAttention):
    """Qwen3-Next's: one matrix for all four, and one for decay and beta, stored by key head."""

    def build_projections(self) -> None:
        heads = self.heads
        sizes = [heads.keys, heads.keys, heads.values, heads.values]
        self.in_proj_qkvz = self._by_key_head("in_proj_qkvz", sizes)
        self.in_proj_ba = self._by_key_head("in_proj_ba", [heads.heads, heads.heads])

    def _by_key_head(self, name: str, sizes: list[int]) -> StackedByHead:
        path, heads = f"{self.prefix}.{name}", self.heads.key_heads
        return StackedByHead(self.hidden_size, sizes, heads, prefix=path, **self._types)

    def project(self, hidden: torch.Tensor) -> Projected:
        beta, decay = self.in_proj_ba(hidden).tensor_split(2, dim=-1)
        values = self.heads.values // self.tp.size
        mixed = self.in_proj_qkvz(hidden)
        qkv, gate = mixed.split_with_sizes([mixed.shape[-1] - values, values], dim=-1)
        return qkv, gate, decay, beta


@PluggableLayer.register("olmo_hybrid_gated_delta_net_attention")
class OlmoHybridGatedDeltaNetAttention(GatedDeltaNetAttention):
    """OLMo Hybrid's: a matrix for each."""

    norm_name, out_name = "o_norm", "o_proj"

    def build_projections(self) -> None:
        heads = self.heads
        self.qkv_proj = self.merged("qkv_proj", [heads.keys, heads.keys, heads.values])
        self.g_proj = self.column("g_proj", heads.values)
        self.ba_proj = self.merged("ba_proj", [heads.heads, heads.heads])

    def project(self, hidden: torch.Tensor) -> Projected:
        beta, decay = self.ba_proj(hidden).tensor_split(2, dim=-1)
        return self.qkv_proj(hidden), self.g_proj(hidden), decay, beta


@PluggableLayer.register("kimi_gated_delta_net_attention")
class KimiGatedDeltaNetAttention(GatedDeltaNetAttention):
    """Kimi Delta Attention (arXiv:2510.26692): a decay for each key channel; decay and gate are of low rank."""

    decay_per_channel = True
    norm_name, out_name = "o_norm", "o_proj"

    def build_projections(self) -> None:
        heads = self.heads
        self.qkv_proj = self.merged("qkv_proj", [heads.keys, heads.keys, heads.values])
        self.b_proj = self.column("b_proj", heads.heads)
        self.f_a_proj, self.f_b_proj = self._low_rank("f", heads.key_size, heads.heads * heads.key_size)
        self.g_a_proj, self.g_b_proj = self._low_rank("g", heads.value_size, heads.values)

    def _low_rank(self, name: str, rank: int, size: int) -> tuple[ReplicatedLinear, ColumnParallelLinear]:
        first, second = f"{self.prefix}.{name}_a_proj", f"{self.prefix}.{name}_b_proj"
        return (
            ReplicatedLinear(self.hidden_size, rank, False, prefix=first, **self._types),
            ColumnParallelLinear(rank, size, False, prefix=second, **self._types),
        )

    def project(self, hidden: torch.Tensor) -> Projected:
        decay, gate = self.f_b_proj(self.f_a_proj(hidden)), self.g_b_proj(self.g_a_proj(hidden))
        return self.qkv_proj(hidden), gate, decay, self.b_proj(hidden)
