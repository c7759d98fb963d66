"""How tokens choose their experts: the router's linear layer and the choice, each a layer that a plugin may replace."""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from torch import nn

from llm.base.checks import refuse
from llm.base.custom_op import CustomOp, PluggableLayer
from llm.kernels.backend import Operations
from llm.layers.custom_op import KernelOp
from llm.layers.linear import ReplicatedLinear
from llm.quantization.base import LinearMethodBase, QuantizationConfig
from llm.quantization.unquantized import UnquantizedLinearMethod, new_parameter


@PluggableLayer.register("gate_linear")
class GateLinear(ReplicatedLinear):
    """The router's logits: x float [N, H] -> float32 [N, E].

    It is never quantized, and its activations are never rounded: a small error changes which experts compute.

    Args:
        correction_bias: hold `e_score_correction_bias`, float32 [E], which is added to scores when experts are chosen.
        Further arguments: `ReplicatedLinear`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        bias: bool = False,
        correction_bias: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(hidden_size, num_experts, bias, **kwargs)
        self.e_score_correction_bias: nn.Parameter | None = None
        if correction_bias:
            self.e_score_correction_bias = new_parameter(torch.zeros(num_experts), _load_flat)

    def _resolve_method(self, quant_config: QuantizationConfig | None) -> LinearMethodBase:
        return UnquantizedLinearMethod(may_round=False)


def _load_flat(param: nn.Parameter, loaded: torch.Tensor, shard_id: object = None) -> int:
    """Some checkpoints store [1, E]."""
    if loaded.numel() != param.numel():
        raise ValueError(f"has shape {list(loaded.shape)}, the model needs {list(param.shape)}")
    param.data.copy_(loaded.reshape(param.shape))
    return param.numel()


@CustomOp.register("topk_router")
class TopKRouter(KernelOp):
    """The experts of each token: logits float32 [N, E] -> (weights float32 [N, K], ids int64 [N, K]).

    Of equal scores the expert with the lower id comes first. A row with a NaN gets weights of NaN.

    Args:
        top_k: K.
        renormalize: the weights of a token sum to `routed_scaling_factor`.
        scoring_func: "softmax" or "sigmoid" of the logits.
        e_score_correction_bias: float32 [E], added to scores when experts are chosen, and not to the weights.
        num_expert_group, topk_group: experts lie in so many runs, of which the best `topk_group` take part.
        routed_scaling_factor: on the weights.
    """

    operations = ("select_experts",)

    def __init__(
        self,
        top_k: int,
        renormalize: bool = True,
        scoring_func: str = "softmax",
        e_score_correction_bias: torch.Tensor | None = None,
        num_expert_group: int = 1,
        topk_group: int = 1,
        routed_scaling_factor: float = 1.0,
        *,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        if scoring_func not in ("softmax", "sigmoid"):
            refuse("scoring_func", scoring_func, "'softmax' or 'sigmoid'")
        self.top_k = top_k
        self.renormalize = renormalize
        self.scoring_func = scoring_func
        self.num_expert_group = num_expert_group
        self.topk_group = topk_group
        self.routed_scaling_factor = routed_scaling_factor
        # In a list: the parameter is the gate's, and is registered there.
        self._correction = [e_score_correction_bias]

    def compute(self, ops: Operations, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.select_experts(
            logits,
            self.top_k,
            self.scoring_func,
            self.renormalize,
            self._correction[0],
            self.num_expert_group,
            self.topk_group,
            self.routed_scaling_factor,
        )

    def extra_repr(self) -> str:
        return f"top_k={self.top_k}, {self.scoring_func}, renormalize={self.renormalize}"


@CustomOp.register("grouped_topk")
class GroupedTopk(TopKRouter):
    """The choice of DeepSeek V2 and V3: experts lie in groups, and only the best groups take part.

    A group counts as its best expert; with `e_score_correction_bias` as the sum of its two best by score plus bias. Of
    equal groups the lower index comes first.

    Args:
        topk: K.
        num_expert_group, topk_group: how many groups there are, and how many take part; 0: one.
        Further arguments: `TopKRouter`, in vLLM's order.
    """

    def __init__(
        self,
        topk: int,
        renormalize: bool,
        num_expert_group: int = 0,
        topk_group: int = 0,
        scoring_func: str = "softmax",
        routed_scaling_factor: float = 1.0,
        *,
        e_score_correction_bias: torch.Tensor | None = None,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(
            topk,
            renormalize,
            scoring_func,
            e_score_correction_bias,
            num_expert_group or 1,
            topk_group or 1,
            routed_scaling_factor,
            enforce_enable=enforce_enable,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.topk_group} of {self.num_expert_group} groups"


@CustomOp.register("sparse_mixer")
class SparseMixer(KernelOp):
    """The choice of Phi 3.5 MoE, a `custom_routing_function`: logits float32 [N, E] -> weights [N, 2], ids [N, 2].

    See `mix_two_experts` in `kernels/reference/experts.py`; the hidden states do not matter.

    Args:
        jitter_eps: half of the relative distance up to which an expert takes part in the other's softmax.
    """

    operations = ("mix_two_experts",)

    def __init__(self, jitter_eps: float = 0.01, *, enforce_enable: bool = False) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.jitter_eps = jitter_eps

    def compute(
        self,
        ops: Operations,
        hidden_states: torch.Tensor,
        gating_output: torch.Tensor,
        topk: int = 2,
        renormalize: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if topk != 2:
            refuse("topk", topk, "2: a sparse mixer chooses two experts")
        return ops.mix_two_experts(gating_output, self.jitter_eps)

    def extra_repr(self) -> str:
        return f"jitter_eps={self.jitter_eps}"


class Routing(TypedDict, total=False):
    """How experts are chosen, under vLLM's names; what `TopKRouter` takes, and whether there are groups."""

    renormalize: bool
    use_grouped_topk: bool
    num_expert_group: int | None
    topk_group: int | None
    scoring_func: str
    routed_scaling_factor: float
    e_score_correction_bias: torch.Tensor | None


def make_router(top_k: int, routing: Routing) -> nn.Module:
    """logits float32 [N, E] -> (weights float32 [N, K], ids int64 [N, K])."""
    renormalize, scoring = routing.get("renormalize", True), routing.get("scoring_func", "softmax")
    bias, scale = routing.get("e_score_correction_bias"), routing.get("routed_scaling_factor", 1.0)
    if not routing.get("use_grouped_topk", False):
        return TopKRouter(top_k, renormalize, scoring, bias, routed_scaling_factor=scale)
    groups, best = routing.get("num_expert_group") or 0, routing.get("topk_group") or 0
    return GroupedTopk(top_k, renormalize, groups, best, scoring, scale, e_score_correction_bias=bias)
