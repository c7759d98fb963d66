"""The layer of experts under transformers' modeling code, in the place of a block's `experts` module.

The signature of `TransformersFusedMoE` is transformers' `experts(hidden_states, top_k_index, top_k_weights)`: the block
there has a router of its own. Reads the shapes and the layout of transformers' stacked weights.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from llm.base.custom_op import CustomOp
from llm.errors import UnsupportedModelError
from llm.kernels.reference.activation import SWIGLUOAI_ALPHA, SWIGLUOAI_LIMIT
from llm.layers.moe.fused_moe import FusedMoE
from llm.layers.moe.router import Routing
from llm.layers.parallel import SINGLE, TensorParallel
from llm.quantization.base import QuantizationConfig, WeightLoader

# transformers' names of activations -> those of the operation `experts`.
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


class StackedExperts(Protocol):
    """What is read of transformers' modules of experts; only those with `has_bias` have biases."""

    gate_up_proj: torch.Tensor
    down_proj: torch.Tensor
    gate_up_proj_bias: torch.Tensor
    down_proj_bias: torch.Tensor
    is_transposed: bool
    is_concatenated: bool
    has_bias: bool
    has_gate: bool
    config: object

    def _apply_gate(self, gate_up_out: torch.Tensor) -> torch.Tensor: ...


@CustomOp.register("transformers_fused_moe")
class TransformersFusedMoE(FusedMoE):
    """`FusedMoE` without a router: who goes where is an argument. See `of` and `load_experts`."""

    vllm_name = "TransformersMoERunner"

    def forward_native(  # type: ignore[override]
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """float [..., H], ids and weights [N, K] with N tokens -> the type and shape of `hidden_states`."""
        x = hidden_states.reshape(-1, self.hidden_size).float()
        y = self.combine(x, *self.select(x, top_k_index, top_k_weights))
        return y.to(hidden_states.dtype).view(hidden_states.shape)

    def select(  # type: ignore[override]
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return top_k_weights.float(), top_k_index.long()

    def _make_router(self, routing: Routing) -> nn.Module | None:
        return None

    @classmethod
    def of(
        cls,
        experts: StackedExperts,
        top_k: int,
        *,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        tp: TensorParallel = SINGLE,
    ) -> TransformersFusedMoE:
        """The layer in the place of transformers' module `experts`, whose weights may be on the meta device.

        Raises:
            UnsupportedModelError: experts that are computed in another way than here.
        """
        activation, limit = _activation(experts)
        down = experts.down_proj
        inner, hidden = down.shape[1:] if experts.is_transposed else (down.shape[2], down.shape[1])
        return cls(
            len(down),
            top_k,
            hidden,
            inner,
            params_dtype or down.dtype,
            quant_config=quant_config,
            prefix=prefix,
            activation=activation,
            swiglu_limit=limit,
            has_bias=experts.has_bias,
            tp=tp,
        )

    def load_experts(self, experts: StackedExperts) -> None:
        """Copy the weights of transformers' module, as a checkpoint's; `process_weights` is to follow."""
        for index, ours in enumerate(self.experts):
            both, down = experts.gate_up_proj[index], experts.down_proj[index]
            if experts.is_transposed:
                both, down = both.t(), down.t()
            for shard, part in enumerate(_halves(both, experts.is_concatenated)):
                _load(ours.gate_up_proj, "weight", part, shard)
            _load(ours.down_proj, "weight", down)
            if experts.has_bias:
                both = experts.gate_up_proj_bias[index]
                for shard, part in enumerate(_halves(both, experts.is_concatenated)):
                    _load(ours.gate_up_proj, "bias", part, shard)
                _load(ours.down_proj, "bias", experts.down_proj_bias[index])


def _activation(experts: StackedExperts) -> tuple[str, float]:
    """(activation of the operation `experts`, its limit)."""
    name, config = type(experts).__name__, experts.config
    if not experts.has_gate or getattr(experts, "has_post_expert_norm", False):
        raise UnsupportedModelError(f"{name} of transformers has no gate, or a norm of its own: it is not computed.")
    own_gate = type(experts)._apply_gate.__module__ != "transformers.integrations.moe"
    if own_gate and getattr(experts, "alpha", None) == SWIGLUOAI_ALPHA:
        return "swigluoai", getattr(experts, "limit", SWIGLUOAI_LIMIT)
    given = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    if own_gate or given not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{name} of transformers has the activation {given!r}{' and a gate of its own' if own_gate else ''}; "
            f"computed are {', '.join(_ACTIVATIONS)}."
        )
    return _ACTIVATIONS[given], SWIGLUOAI_LIMIT


def _halves(both: torch.Tensor, is_concatenated: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if not is_concatenated:
        return both[::2], both[1::2]
    gate, up = both.chunk(2)
    return gate, up


def _load(layer: nn.Module, name: str, values: torch.Tensor, shard: int | None = None) -> None:
    parameter = layer.get_parameter(name)
    loader: WeightLoader = parameter.weight_loader  # type: ignore[attr-defined]
    loader(parameter, values.detach(), shard)
