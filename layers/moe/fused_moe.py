"""The layer of experts: which weights it has, how tokens are given to them, and where results of ranks meet.

Owns `FusedMoE` and its children, the experts. Who goes where is `router.py`'s, the arithmetic `method.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from llm.base.checks import refuse
from llm.base.custom_op import PluggableLayer
from llm.base.watch import Patchable, Watch
from llm.kernels.reference.activation import SWIGLUOAI_ALPHA, SWIGLUOAI_LIMIT
from llm.kernels.weight import ExpertWeights, Weight
from llm.layers.activation import GeluAndMul, SiluAndMul
from llm.layers.extra.activation import SiluAndMulWithClamp
from llm.layers.linear import LinearBase, MergedColumnParallelLinear, RowParallelLinear
from llm.layers.moe.method import UnquantizedFusedMoEMethod
from llm.layers.moe.router import Routing, make_router
from llm.layers.parallel import SINGLE, TensorParallel
from llm.quantization.base import PackedLinearMethod, QuantizationConfig

if TYPE_CHECKING:
    from typing_extensions import Unpack

# As the operation `experts` names them; "swigluoai" has a limit.
ACTIVATIONS: dict[str, Callable[[float], nn.Module]] = {
    "silu": lambda limit: SiluAndMul(),
    "gelu": lambda limit: GeluAndMul(),
    "gelu_tanh": lambda limit: GeluAndMul("tanh"),
    "swigluoai": lambda limit: SiluAndMulWithClamp(limit, alpha=SWIGLUOAI_ALPHA, beta=1.0),
}

# (hidden states, logits, top_k, renormalize) -> weights float32 [N, K], ids [N, K].
RoutingFunction = Callable[[torch.Tensor, torch.Tensor, int, bool], tuple[torch.Tensor, torch.Tensor]]


class Expert(Patchable):
    """One expert: down(act(gate(x)) * up(x)), of which a rank has its part of the channels between.

    Names, shards and quantization are those of any linear layer. Called only where the operation `experts` is not.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        act_fn: nn.Module,
        *,
        bias: bool,
        params_dtype: torch.dtype | None,
        quant_config: QuantizationConfig | None,
        prefix: str,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size,
            [intermediate_size, intermediate_size],
            bias,
            params_dtype=params_dtype,
            quant_config=quant_config,
            prefix=f"{prefix}.gate_up_proj",
            tp=tp,
        )
        self.down_proj = RowParallelLinear(
            intermediate_size,
            hidden_size,
            bias,
            reduce_results=False,
            params_dtype=params_dtype,
            quant_config=quant_config,
            prefix=f"{prefix}.down_proj",
            tp=tp,
        )
        self._act_fn = [act_fn]  # no child: the operation `experts` computes it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self._act_fn[0](self.gate_up_proj(x)))


@PluggableLayer.register("fused_moe")
class FusedMoE(PluggableLayer):
    """The sum over each token's experts of weight * down(act(gate(x)) * up(x)), x float [N, H].

    Its experts are its children "0", "1", ... with a `gate_up_proj` and a `down_proj` each. One call of the operation
    `experts` computes all of them. A token's bits depend on that token alone.

    Args:
        num_experts, top_k: how many there are, and how many a token goes to.
        hidden_size, intermediate_size: of the whole model; ranks split the intermediate channels.
        params_dtype: storage type of unquantized weights; None: torch's default.
        reduce_results: give every rank the sum; False: each keeps its term.
        quant_config: picks the methods of the experts' linear layers.
        prefix: dotted path of the layer in the model.
        custom_routing_function: (hidden_states, gating_output, topk, renormalize) -> (weights, ids), in the place of
            `router`, which is then None.
        apply_router_weight_on_input: multiply an expert's input by its weight in place of its output; top_k is 1.
        activation: a key of `ACTIVATIONS`.
        has_bias: whether the experts have biases.
        swiglu_limit: of the activation "swigluoai".
        tp: this layer's place in a tensor-parallel group.
        routing: how experts are chosen, see `make_router`.

    Raises:
        ValidationError: numbers that do not fit each other.
    """

    quant_kind = "moe"

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        params_dtype: torch.dtype | None = None,
        reduce_results: bool = True,
        *,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        custom_routing_function: RoutingFunction | None = None,
        apply_router_weight_on_input: bool = False,
        activation: str = "silu",
        has_bias: bool = False,
        swiglu_limit: float = SWIGLUOAI_LIMIT,
        tp: TensorParallel = SINGLE,
        **routing: Unpack[Routing],
    ) -> None:
        super().__init__()
        _check(num_experts, top_k, activation, apply_router_weight_on_input)
        self.num_experts, self.top_k, self.hidden_size = num_experts, top_k, hidden_size
        self.activation, self.swiglu_limit = activation, swiglu_limit
        self.renormalize, self.reduce_results = routing.get("renormalize", True), reduce_results
        self.apply_router_weight_on_input = apply_router_weight_on_input
        self.custom_routing_function = custom_routing_function
        self.prefix, self.tp = prefix, tp
        self.router = make_router(top_k, **routing) if custom_routing_function is None else None
        self.quant_method = UnquantizedFusedMoEMethod()
        act_fn = ACTIVATIONS[activation](swiglu_limit)
        for index in range(num_experts):
            expert = Expert(
                hidden_size,
                intermediate_size,
                act_fn,
                bias=has_bias,
                params_dtype=params_dtype,
                quant_config=quant_config,
                prefix=f"{prefix}.{index}" if prefix else str(index),
                tp=tp,
            )
            self.add_module(str(index), expert)
        # The experts are registered under their numbers.
        self._experts = tuple(module for module in self.children() if isinstance(module, Expert))
        self._is_watched = Watch(module for expert in self._experts for module in expert.modules())
        self._weights: ExpertWeights | None = None

    @property
    def experts(self) -> Sequence[Expert]:
        return self._experts

    def forward(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        weights, ids = self.select(hidden_states, router_logits)
        if self.apply_router_weight_on_input:
            hidden_states, weights = hidden_states * weights, torch.ones_like(weights)
        y = self.quant_method.apply(self, hidden_states, weights, ids)
        return self.tp.all_reduce(y) if self.reduce_results else y

    def select(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights float32 [N, K] and ids int64 [N, K] of each token's experts."""
        if self.router is not None:
            return self.router(router_logits)
        if self.custom_routing_function is None:
            raise RuntimeError("a layer of experts has a router or a routing function")
        weights, ids = self.custom_routing_function(hidden_states, router_logits, self.top_k, self.renormalize)
        return weights.float(), ids.long()

    def expert_weights(self) -> ExpertWeights | None:
        """The weights of all experts for one call; None: the experts must be called one by one."""
        if self._is_watched():
            return None
        gate_up = tuple(_weight_of(expert.gate_up_proj, True) for expert in self._experts)
        down = tuple(_weight_of(expert.down_proj, self.tp.rank == 0) for expert in self._experts)
        known = self._weights
        if known is None or known.gate_up != gate_up or known.down != down:
            known = self._weights = _together(gate_up, down)
        return known

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, top_k={self.top_k}, activation={self.activation!r}"


def _weight_of(layer: LinearBase, adds_bias: bool) -> Weight | None:
    """What the layer multiplies with; None: only its method knows, or somebody patched it."""
    method, bias = layer.quant_method, layer.bias if adds_bias else None
    if layer.packed_weight is None or not isinstance(method, PackedLinearMethod):
        return None
    if getattr(method.apply, "__func__", None) is not PackedLinearMethod.apply:
        return None
    return layer.packed_weight if layer.packed_weight.bias is bias else method.weight_with(layer, bias)


def _together(gate_up: Sequence[Weight | None], down: Sequence[Weight | None]) -> ExpertWeights | None:
    """None where they are not of one kind: patterns may quantize some experts in another way than others."""
    for weights in (gate_up, down):
        known = [(weight.kind, weight.activations, weight.group_size) for weight in weights if weight is not None]
        if len(known) < len(weights) or len(set(known)) > 1:
            return None
    return ExpertWeights(tuple(filter(None, gate_up)), tuple(filter(None, down)))


def _check(num_experts: int, top_k: int, activation: str, weight_on_input: bool) -> None:
    if not 1 <= top_k <= num_experts:
        refuse("top_k", top_k, f"from 1 to num_experts, {num_experts}")
    if activation not in ACTIVATIONS:
        refuse("activation", activation, f"one of {', '.join(map(repr, ACTIVATIONS))}")
    if weight_on_input and top_k != 1:
        refuse("top_k", top_k, "1 with apply_router_weight_on_input")
