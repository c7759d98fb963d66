"""Feed-forwards: gated, plain, of experts; and what families with experts spell alike in their files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from llm.base.text import show
from llm.base.watch import Patchable
from llm.errors import UnsupportedModelError
from llm.forward import ForwardBatch
from llm.kernels.reference.activation import SWIGLUOAI_LIMIT
from llm.layers.activation import GATED_ACTIVATIONS, PLAIN_ACTIVATIONS, GeluAndMulSparse
from llm.layers.linear import (
    ColumnFactors,
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from llm.layers.moe import FusedMoE, GateLinear
from llm.layers.moe.fused_moe import RoutingFunction
from llm.layers.moe.router import Routing
from llm.models.config_reader import ConfigReader
from llm.models.decoder.part import BuildContext, PartConfig


@dataclass(frozen=True)
class GatedMLPConfig(PartConfig):
    """down(act(gate(x)) * up(x)); `activation` is a key of `GATED_ACTIVATIONS`, `bias`: all three have one.

    `gate_multiplier` and `down_multiplier` are constants that multiply gate(x) and the result. `sparsity` is the share
    of the gate that is zero, with gelu_pytorch_tanh.
    """

    intermediate_size: int
    activation: str = "silu"
    bias: bool = False
    gate_multiplier: float = 1.0
    down_multiplier: float = 1.0
    sparsity: float = 0.0

    def __post_init__(self) -> None:
        _check_activation(self.activation, GATED_ACTIVATIONS)

    def build(self, context: BuildContext, prefix: str) -> nn.Module:
        return GatedMLP(self, context, prefix)


@dataclass(frozen=True)
class PlainMLPConfig(PartConfig):
    """down(act(up(x))); `activation` is a key of `PLAIN_ACTIVATIONS`, `bias`: both have one."""

    intermediate_size: int
    activation: str
    bias: bool = False

    def __post_init__(self) -> None:
        _check_activation(self.activation, PLAIN_ACTIVATIONS)

    def build(self, context: BuildContext, prefix: str) -> nn.Module:
        return PlainMLP(self, context, prefix)


class GatedMLP(Patchable):
    def __init__(self, config: GatedMLPConfig, context: BuildContext, prefix: str) -> None:
        super().__init__()
        hidden, inner = context.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden,
            [inner, inner],
            bias=config.bias,
            prefix=f"{prefix}.gate_up_proj",
            **context.linear,
        )
        self.down_proj = RowParallelLinear(
            inner, hidden, bias=config.bias, prefix=f"{prefix}.down_proj", **context.linear
        )
        self.act_fn = (
            GeluAndMulSparse(config.sparsity, "tanh") if config.sparsity else GATED_ACTIVATIONS[config.activation]()
        )
        gate, up = self.gate_up_proj.output_partition_sizes
        factors = [(gate, config.gate_multiplier), (up, 1.0)]
        self.factors = None if config.gate_multiplier == 1.0 else ColumnFactors(factors)
        self.multiplier = config.down_multiplier

    def forward(self, hidden: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        both = self.gate_up_proj(hidden)
        y = self.down_proj(self.act_fn(both if self.factors is None else self.factors(both)))
        return y if self.multiplier == 1.0 else y * self.multiplier


class PlainMLP(Patchable):
    def __init__(self, config: PlainMLPConfig, context: BuildContext, prefix: str) -> None:
        super().__init__()
        hidden, inner = context.hidden_size, config.intermediate_size
        self.up_proj = ColumnParallelLinear(
            hidden, inner, bias=config.bias, prefix=f"{prefix}.up_proj", **context.linear
        )
        self.down_proj = RowParallelLinear(
            inner, hidden, bias=config.bias, prefix=f"{prefix}.down_proj", **context.linear
        )
        self.act_fn = PLAIN_ACTIVATIONS[config.activation]()

    def forward(self, hidden: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.up_proj(hidden)))


def _check_activation(name: str, known: Mapping[str, object]) -> None:
    if name not in known:
        raise UnsupportedModelError(
            f"config.json: hidden_act (or activation_function) {show(name)} is not supported; known: "
            f"{', '.join(known)}."
        )


# Hugging Face's names of activations -> those of the operation `experts`.
_GATED = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "swigluoai": "swigluoai"}
_UNGATED = {"relu2": "relu2_no_mul"}
_ACTIVATIONS = _GATED | _UNGATED


@dataclass(frozen=True)
class MoEConfig(PartConfig):
    """The sum of the `top_k` experts that each token chooses, and of what every token has.

    Attributes:
        intermediate_size: of one expert.
        activation: as in `GatedMLPConfig`, or "swigluoai" with `swiglu_limit`, or "relu2": neither the experts nor
            what every token has have a gate then.
        renormalize: a token's weights sum to `routed_scaling_factor`.
        scoring: "softmax" or "sigmoid" of the router's logits.
        correction_bias: the router has a bias for choosing alone.
        groups, topk_group: experts lie in groups, of which a token uses the best.
        bias, router_bias: of the experts' matrices, and of the router's.
        weight_on_input: an expert's input is multiplied by its weight, not its output; `top_k` is 1.
        routing_function: makes what chooses in the place of all of this, see `FusedMoE`.
        shared_size: intermediate size of the feed-forward that every token has; None: there is none.
        shared_bias: what every token has, and the projections of `latent_size`, have biases.
        latent_size: channels that hidden states are projected to for the experts, and back from; None: they are not.
        shared_gate: its output is multiplied by the sigmoid of a linear layer with one output; it is then a layer of
            one expert, `shared_experts.0`.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    activation: str = "silu"
    renormalize: bool = True
    scoring: str = "softmax"
    correction_bias: bool = False
    groups: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    bias: bool = False
    router_bias: bool = False
    swiglu_limit: float = SWIGLUOAI_LIMIT
    routing_function: Callable[[], RoutingFunction] | None = None
    shared_size: int | None = None
    shared_gate: bool = False
    weight_on_input: bool = False
    shared_bias: bool = False
    latent_size: int | None = None

    def __post_init__(self) -> None:
        if self.activation not in _ACTIVATIONS:
            raise UnsupportedModelError(
                f"config.json: hidden_act {show(self.activation)} is not supported for experts; known: "
                f"{', '.join(_ACTIVATIONS)}."
            )
        chosen_from = self.num_experts // self.groups * self.topk_group
        if self.num_experts % self.groups or not self.topk_group <= self.groups or self.top_k > chosen_from:
            raise UnsupportedModelError(
                f"config.json: {self.top_k} experts per token cannot be chosen from {self.num_experts} experts in "
                f"{self.groups} groups of which {self.topk_group} take part."
            )

    @property
    def experts(self) -> int:
        return self.num_experts

    def routing(self, correction_bias: torch.Tensor | None) -> Routing:
        return {
            "renormalize": self.renormalize,
            "use_grouped_topk": self.groups > 1,
            "num_expert_group": self.groups,
            "topk_group": self.topk_group,
            "scoring_func": self.scoring,
            "routed_scaling_factor": self.routed_scaling_factor,
            "e_score_correction_bias": correction_bias,
        }

    def build(self, context: BuildContext, prefix: str) -> nn.Module:
        return MoEBlock(self, context, prefix)


class MoEBlock(Patchable):
    """Shapes: hidden float [N, H] -> float [N, H]."""

    def __init__(self, config: MoEConfig, context: BuildContext, prefix: str) -> None:
        super().__init__()
        hidden = context.hidden_size
        dtype = context.options.params_dtype
        self.gate = GateLinear(
            hidden,
            config.num_experts,
            config.router_bias,
            config.correction_bias,
            params_dtype=dtype,
            prefix=f"{prefix}.gate",
            return_bias=False,
        )
        activation = _ACTIVATIONS[config.activation]
        self.experts = FusedMoE(
            config.num_experts,
            config.top_k,
            config.latent_size or hidden,
            config.intermediate_size,
            prefix=f"{prefix}.experts",
            activation=activation,
            swiglu_limit=config.swiglu_limit,
            has_bias=config.bias,
            apply_router_weight_on_input=config.weight_on_input,
            custom_routing_function=None if config.routing_function is None else config.routing_function(),
            **config.routing(self.gate.e_score_correction_bias),
            **context.common,
        )
        self.fc1_latent_proj, self.fc2_latent_proj = self._latent_projections(config, context, prefix)
        self.shared_experts: nn.Module | None = None
        self.shared_expert_gate: GateLinear | None = None
        path, size = f"{prefix}.shared_experts", config.shared_size
        if size is not None and config.shared_gate:
            # Sigmoid of one logit as its weight: a layer of one expert.
            self.shared_expert_gate = GateLinear(
                hidden, 1, params_dtype=dtype, prefix=f"{prefix}.shared_expert_gate", return_bias=False
            )
            one: Routing = {"scoring_func": "sigmoid", "renormalize": False}
            self.shared_experts = FusedMoE(
                1, 1, hidden, size, prefix=path, activation=activation, **one, **context.common
            )
        elif size is not None:
            mlp = PlainMLPConfig if config.activation in _UNGATED else GatedMLPConfig
            self.shared_experts = mlp(size, config.activation, config.shared_bias).build(context, path)

    @staticmethod
    def _latent_projections(
        config: MoEConfig, context: BuildContext, prefix: str
    ) -> tuple[ReplicatedLinear | None, ReplicatedLinear | None]:
        latent, hidden, bias = config.latent_size, context.hidden_size, config.shared_bias
        if latent is None:
            return None, None
        return (
            ReplicatedLinear(hidden, latent, bias, prefix=f"{prefix}.fc1_latent_proj", **context.linear),
            ReplicatedLinear(latent, hidden, bias, prefix=f"{prefix}.fc2_latent_proj", **context.linear),
        )

    def forward(self, hidden: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        logits = self.gate(hidden)
        if self.fc1_latent_proj is None or self.fc2_latent_proj is None:
            y = self.experts(hidden, logits)
        else:
            y = self.fc2_latent_proj(self.experts(self.fc1_latent_proj(hidden), logits))
        if self.shared_experts is None:
            return y
        if self.shared_expert_gate is None:
            return y + self.shared_experts(hidden)
        return y + self.shared_experts(hidden, self.shared_expert_gate(hidden))


def gate_and_up(weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """One expert's part of a stacked tensor: [2I, H], the gate in its first half."""
    gate, up = weight.tensor_split(2)
    yield "gate_proj.weight", gate
    yield "up_proj.weight", up


def up(weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Of experts without a gate: [I, H]."""
    yield "up_proj.weight", weight


def down(weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    yield "down_proj.weight", weight


# Mixtral's names: w1 is the gate, w3 the value, w2 goes down.
W1_W2_W3 = (
    ("model.layers.*.block_sparse_moe.experts.*.w1", "model.layers.*.mlp.experts.*.gate_proj"),
    ("model.layers.*.block_sparse_moe.experts.*.w2", "model.layers.*.mlp.experts.*.down_proj"),
    ("model.layers.*.block_sparse_moe.experts.*.w3", "model.layers.*.mlp.experts.*.up_proj"),
    ("model.layers.*.block_sparse_moe", "model.layers.*.mlp"),
)


def read_experts(
    reader: ConfigReader,
    count: int,
    top_k: int,
    size: int | None = None,
    *,
    count_key: str = "num_experts",
    size_key: str = "moe_intermediate_size",
    **more: Any,
) -> MoEConfig:
    """Experts from the keys that most families have, and the keys of their training, which are passed over.

    Args:
        count, top_k, size: what missing keys mean; a `size` of None: it is not missing.
        more: further fields.
    """
    ignore_training(reader)
    return MoEConfig(
        reader.positive(count_key, count),
        reader.positive("num_experts_per_tok", top_k),
        reader.positive(size_key) if size is None else reader.positive(size_key, size),
        reader.string("hidden_act", "silu"),
        **more,
    )


def ignore_training(reader: ConfigReader) -> None:
    """Keys of the router that matter when a model is trained."""
    for key in ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "router_z_loss_coef"):
        reader.expect(key, reader.raw.get(key))


def sparse_layers(reader: ConfigReader) -> list[bool]:
    """Which layers have experts: every `decoder_sparse_step`-th but those in `mlp_only_layers`."""
    count = reader.positive("num_hidden_layers")
    step = reader.positive("decoder_sparse_step", 1)
    dense = set(reader.integers("mlp_only_layers") or ())
    return [(index + 1) % step == 0 and index not in dense for index in range(count)]


def layers_with_experts(reader: ConfigReader, first: int) -> list[bool]:
    """Which layers have experts, from `mlp_layer_types`; without it, all but the `first` ones."""
    count, kinds = reader.positive("num_hidden_layers"), reader.names("mlp_layer_types")
    if kinds is None:
        return [index >= first for index in range(count)]
    if len(kinds) != count or set(kinds) - {"dense", "sparse"}:
        raise reader.error("mlp_layer_types", kinds, f"{count} of 'dense' or 'sparse'")
    return [kind == "sparse" for kind in kinds]
