"""A layer of Gemma 4: norms before and after both parts, experts beside the feed-forward, per-layer embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from llm.base.custom_op import CustomOp
from llm.base.watch import Patchable
from llm.forward import ForwardBatch
from llm.kernels.backend import Operations
from llm.layers.kernel_op import KernelOp
from llm.layers.moe import FusedMoE, GateLinear
from llm.layers.norm import filled
from llm.models.decoder import BuildContext, LayerConfig, NormConfig, Norms, PartConfig
from llm.models.decoder.layer import DecoderLayer, PreAndPostNormLayer, Stream, add_norm
from llm.models.decoder.per_layer import Factor, PerLayerGate


@dataclass(frozen=True)
class Gemma4Experts(PartConfig):
    """`top_k` of `num_experts`, chosen by a router with a norm of its own and a trained factor on each expert."""

    num_experts: int
    top_k: int
    intermediate_size: int
    norm: NormConfig

    @property
    def experts(self) -> int:
        return self.num_experts

    def build(self, context: BuildContext, prefix: str) -> nn.Module:
        return Gemma4MoE(self, context, prefix)


@CustomOp.register("scaled_topk")
class ScaledTopK(KernelOp):
    """A `custom_routing_function`: the best of a softmax, which sum to 1, each times its expert's factor."""

    operations = ("select_experts", "select_rows", "multiply")

    def __init__(self, num_experts: int, *, enforce_enable: bool = False) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.per_expert_scale = filled(num_experts, 1.0, torch.float32)

    def compute(
        self, ops: Operations, hidden_states: torch.Tensor, gating_output: torch.Tensor, topk: int, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = ops.select_experts(gating_output, topk, "softmax", True, None, 1, 1, 1.0)
        factors = ops.select_rows(self.per_expert_scale.view(-1, 1), ids.view(-1)).view(ids.shape)
        return ops.multiply(weights, factors), ids


class Gemma4MoE(Patchable):
    def __init__(self, config: Gemma4Experts, context: BuildContext, prefix: str) -> None:
        super().__init__()
        hidden = context.hidden_size
        self.norm = config.norm.build(hidden, context)
        self.gate = GateLinear(
            hidden,
            config.num_experts,
            params_dtype=context.options.params_dtype,
            prefix=f"{prefix}.gate",
            return_bias=False,
        )
        self.experts = FusedMoE(
            config.num_experts,
            config.top_k,
            hidden,
            config.intermediate_size,
            prefix=f"{prefix}.experts",
            activation="gelu_tanh",
            custom_routing_function=ScaledTopK(config.num_experts),
            **context.common,
        )
        self.scale = hidden**-0.5

    def forward(self, hidden: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        """`hidden` goes to the experts that the residual stream chooses."""
        return self.experts(hidden, self.gate(self.norm(stream) * self.scale))


@dataclass(frozen=True, kw_only=True)
class Gemma4LayerConfig(LayerConfig):
    """A layer that may have experts beside its feed-forward."""

    moe: Gemma4Experts | None = None

    @property
    def parts(self) -> Mapping[str, PartConfig]:
        return super().parts if self.moe is None else {**super().parts, "moe": self.moe}


@dataclass(frozen=True)
class Gemma4Norms(Norms):
    """Attributes:
    per_layer_size: channels of the layer's embedding of each token; 0: it has none.
    """

    norm: NormConfig
    per_layer_size: int

    def build(self, layer: LayerConfig, context: BuildContext, prefix: str) -> DecoderLayer:
        return Gemma4Layer(layer, self, context, prefix)


class Gemma4Layer(PreAndPostNormLayer):
    moe: nn.Module

    def __init__(self, layer: LayerConfig, norms: Gemma4Norms, context: BuildContext, prefix: str) -> None:
        super().__init__(layer, norms.norm, context, prefix)
        self.has_experts = "moe" in layer.parts
        if self.has_experts:
            for name in ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"):
                self.add_module(name, norms.norm.build(context.hidden_size, context))
        self.per_layer: PerLayerGate | None = None
        if norms.per_layer_size:
            self.per_layer = PerLayerGate(
                norms.per_layer_size, "gelu_pytorch_tanh", norms.norm, context, f"{prefix}.per_layer"
            )
        self.layer_scalar = Factor(context.hidden_size)

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        batch: ForwardBatch,
        inputs: torch.Tensor | None = None,
    ) -> Stream:
        """`inputs`: the layer's embedding of each token, float [N, per_layer_size]."""
        hidden, stream = add_norm(self.input_layernorm, hidden, residual)
        hidden = self.post_attention_layernorm(self.self_attn(hidden, batch))
        hidden, stream = self.pre_feedforward_layernorm(hidden, stream)
        hidden = self.mlp(hidden, batch)
        if self.has_experts:
            beside = self.moe(self.get_submodule("pre_feedforward_layernorm_2")(stream), stream)
            hidden = self.get_submodule("post_feedforward_layernorm_1")(hidden)
            hidden = hidden + self.get_submodule("post_feedforward_layernorm_2")(beside)
        stream = stream + self.post_feedforward_layernorm(hidden)
        if self.per_layer is not None and inputs is not None:
            stream = stream + self.per_layer(stream, inputs)
        stream = self.layer_scalar(stream)
        return stream, torch.zeros_like(stream)
