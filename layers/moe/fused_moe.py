"""The layer of experts: its weights, how tokens are given to them, what computes them, where results of ranks meet.

`FusedMoE` has an `Expert` for each child; who goes where is `router.py`'s. A method computes them: one call of the
operation `experts` with the weights of all, or three parts that can be swapped.

`TransformersFusedMoE` is the layer under transformers' modeling code, in the place of a block's `experts` module, with
the signature of that: the block has a router of its own. It reads the layout of transformers' stacked weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, Protocol, cast

import torch
from torch import nn

from llm.base.checks import refuse
from llm.base.construction import construction
from llm.base.custom_op import CustomOp, replaced_class
from llm.base.watch import Patchable, Watch
from llm.errors import UnsupportedModelError
from llm.kernels.backend import Operations
from llm.kernels.reference.activation import SWIGLUOAI_ALPHA, SWIGLUOAI_LIMIT
from llm.kernels.reference.experts import UNGATED, over_experts
from llm.kernels.select import backend_of_construction
from llm.kernels.weight import ExpertWeights, Weight
from llm.layers.activation import GeluAndMul, ReLUSquaredActivation, SiluAndMul, SiluAndMulWithClamp
from llm.layers.custom_op import KernelOp
from llm.layers.linear import (
    ColumnParallelLinear,
    LinearArguments,
    LinearBase,
    MergedColumnParallelLinear,
    RowParallelLinear,
)
from llm.layers.lora import AdapterRows
from llm.layers.moe.router import Routing, make_router
from llm.layers.parallel import SINGLE, TensorParallel
from llm.quantization.base import FusedMoEMethodBase, PackedLinearMethod, QuantizationConfig, WeightLoader

# (hidden states, logits, top_k, renormalize) -> weights float32 [N, K], ids [N, K].
RoutingFunction = Callable[[torch.Tensor, torch.Tensor, int, bool], tuple[torch.Tensor, torch.Tensor]]

# Token indices -> the context in which an expert computes them.
OfTokens = Callable[[torch.Tensor], AbstractContextManager[None]]

# Names of an expert's matrices in vLLM's checkpoints of stacked weights, by those of the linear layers here.
_STACKED = {"gate_proj": ("w13", "w1"), "up_proj": ("w13", "w3"), "down_proj": ("w2", "w2")}


@CustomOp.register("fused_moe")
class FusedMoE(CustomOp):
    """The sum over each token's experts of weight * down(act(gate(x)) * up(x)), x float [N, H].

    Its experts are its children "0", "1", ... with a `gate_up_proj` and a `down_proj` each. One call of the operation
    `experts` computes all of them. A token's bits depend on that token alone.

    Args:
        num_experts, top_k: how many there are, and how many a token goes to.
        hidden_size, intermediate_size: channels of what goes in and comes out, and inside of an expert.
        params_dtype: storage type of unquantized weights; None: torch's default.
        reduce_results: give every rank the sum; False is for one rank alone.
        quant_config: may have a method for the whole layer (`quant_kind` "moe"); picks those of the experts' linear
            layers.
        prefix: dotted path of the layer in the model.
        custom_routing_function: (hidden_states, gating_output, topk, renormalize) -> (weights, ids), in the place of
            `router`, which is then None. A `CustomOp` keeps the batch invariant; of other functions nothing is known.
        apply_router_weight_on_input: multiply an expert's input by its weight in place of its output; top_k is 1.
        activation: a key of `ACTIVATIONS`; with "relu2_no_mul" experts have no gate, and an `up_proj` in the place of
            `gate_up_proj`.
        has_bias: whether the experts have biases.
        swiglu_limit: of the activation "swigluoai".
        router_logits_dtype: None or float32, which they are.
        enable_eplb: False.
        tp: this layer's place in a tensor-parallel group: ranks have consecutive experts, whole ones.
        renormalize, scoring_func, routed_scaling_factor, e_score_correction_bias: see `TopKRouter`.
        use_grouped_topk, num_expert_group, topk_group: see `GroupedTopk`.

    Attributes:
        w13_weight, w2_weight: float32 [E, 2I, H], gates first, and [E, H, I]: copies of the experts' weights, in the
            order of the router's ids; or the parameters that a method registers under these names.
        adapter_rows: of the step, while a loaded adapter changes an expert.

    Raises:
        ValidationError: numbers that do not fit each other.
    """

    quant_kind = "moe"
    is_layer = True
    rank_of_expert: torch.Tensor

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        params_dtype: torch.dtype | None = None,
        reduce_results: bool = True,
        renormalize: bool = True,
        use_grouped_topk: bool = False,
        num_expert_group: int | None = None,
        topk_group: int | None = None,
        quant_config: QuantizationConfig | None = None,
        *,
        prefix: str = "",
        custom_routing_function: RoutingFunction | None = None,
        scoring_func: str = "softmax",
        routed_scaling_factor: float = 1.0,
        e_score_correction_bias: torch.Tensor | None = None,
        apply_router_weight_on_input: bool = False,
        activation: str = "silu",
        enable_eplb: bool = False,
        has_bias: bool = False,
        swiglu_limit: float = SWIGLUOAI_LIMIT,
        router_logits_dtype: torch.dtype | None = None,
        tp: TensorParallel = SINGLE,
    ) -> None:
        super().__init__()
        _check(num_experts, top_k, activation, apply_router_weight_on_input)
        if enable_eplb:
            refuse("enable_eplb", enable_eplb, "False: nothing balances experts by itself; `place_experts` places them")
        if router_logits_dtype not in (None, torch.float32):
            refuse("router_logits_dtype", router_logits_dtype, "torch.float32, as the router's logits are, or None")
        self.num_experts, self.top_k, self.hidden_size = num_experts, top_k, hidden_size
        if tp.size > 1 and not reduce_results:
            refuse("reduce_results", reduce_results, "True: ranks hold no terms of a sum, but whole experts")
        self.intermediate_size_per_partition = intermediate_size  # a name of vLLM's, where ranks may split it
        self.activation, self.swiglu_limit, self.has_bias = activation, swiglu_limit, has_bias
        self.renormalize, self.reduce_results = renormalize, reduce_results
        self.apply_router_weight_on_input = apply_router_weight_on_input
        self.custom_routing_function = custom_routing_function
        self.prefix, self.tp = prefix, tp
        firsts = [rank * num_experts // tp.size for rank in range(tp.size + 1)]
        self._held = range(firsts[tp.rank], firsts[tp.rank + 1])  # the experts of this rank
        if tp.size > 1:
            ranks = [rank for rank, (first, end) in enumerate(pairwise(firsts)) for _ in range(first, end)]
            self.register_buffer("rank_of_expert", torch.tensor(ranks), persistent=False)
        self._backend = backend_of_construction()
        self.router = self._make_router(
            {
                "renormalize": renormalize,
                "use_grouped_topk": use_grouped_topk,
                "num_expert_group": num_expert_group,
                "topk_group": topk_group,
                "scoring_func": scoring_func,
                "routed_scaling_factor": routed_scaling_factor,
                "e_score_correction_bias": e_score_correction_bias,
            }
        )
        self.quant_method = self._resolve_method(quant_config)
        sizes = (num_experts, hidden_size, self.intermediate_size_per_partition)
        dtype = params_dtype or torch.get_default_dtype()
        self.quant_method.create_weights(self, *sizes, dtype, weight_loader=self.weight_loader)
        stacked = any(True for _ in self.parameters(recurse=False))
        if stacked and tp.size > 1:
            raise UnsupportedModelError(
                f"{prefix}: {type(self.quant_method).__name__} stacks the weights of all experts, and cannot be split "
                f"over {tp.size} ranks."
            )
        if not stacked:
            self._add_experts(intermediate_size, params_dtype, quant_config)
        # The experts are registered under their numbers.
        self._experts = tuple(module for module in self.children() if isinstance(module, Expert))
        self.place_experts(None)
        parts = [module for expert in self._experts for module in expert.modules()]
        self._has_replaced = any(replaced_class(kind) is not None for kind in {type(part) for part in parts})
        self._is_watched = Watch(parts)
        self._weights: ExpertWeights | None = None
        self.adapter_rows: AdapterRows | None = None

    def _make_router(self, routing: Routing) -> nn.Module | None:
        return make_router(self.top_k, routing) if self.custom_routing_function is None else None

    def _resolve_method(self, quant_config: QuantizationConfig | None) -> FusedMoEMethodBase:
        method = quant_config.get_quant_method(self, self.prefix) if quant_config else None
        if method is None:
            return UnquantizedFusedMoEMethod()
        if not isinstance(method, FusedMoEMethodBase):
            raise TypeError(f"{self.prefix}: {type(method).__name__} is not a FusedMoEMethodBase")
        return method

    def _add_experts(
        self, intermediate_size: int, params_dtype: torch.dtype | None, quant_config: QuantizationConfig | None
    ) -> None:
        act_fn = ACTIVATIONS[self.activation](self.swiglu_limit)
        for index in self._held:
            expert = Expert(
                self.hidden_size,
                intermediate_size,
                act_fn,
                is_gated=self.activation not in UNGATED,
                bias=self.has_bias,
                params_dtype=params_dtype,
                quant_config=quant_config,
                prefix=f"{self.prefix}.{index}" if self.prefix else str(index),
            )
            self.add_module(str(index), expert)

    def __getattr__(self, name: str) -> Any:
        # No properties: methods with stacked weights register parameters of these names.
        if name in ("w13_weight", "w2_weight") and (experts := self.__dict__.get("_experts")):
            layer = "down_proj" if name == "w2_weight" else FIRST_LAYER[self.activation not in UNGATED]
            parts = [getattr(expert, layer) for expert in experts]
            return torch.stack([part.quant_method.dequantize_weight(part) for part in parts])
        return super().__getattr__(name)

    @property
    def experts(self) -> Sequence[Expert]:
        """By the ids that the router gives; none where the method has weights of its own."""
        return self._experts

    @property
    def placed_experts(self) -> Sequence[Expert]:
        """In the order in which the method computes them; see `place_experts`."""
        return self._placed

    def place_experts(self, logical_to_physical_map: Sequence[int] | None) -> None:
        """Put expert i, as the router numbers them, at place `logical_to_physical_map[i]`; None: at place i.

        The hook of an expert balancer, which decides by `llm.expert_load` what lies beside what. Ids, names of weights
        and `expert_load` stay those of the router, and answers keep their bits.

        Raises:
            ValidationError: no permutation of the experts, or they are not children of this layer.
        """
        self._map: list[torch.Tensor] = []  # in a list: it is no weight
        self._placed = self._experts
        if logical_to_physical_map is None:
            return
        if self.tp.size > 1:
            refuse(
                "logical_to_physical_map", logical_to_physical_map, "None with several ranks, which have experts by id"
            )
        places = [int(place) for place in logical_to_physical_map]
        if sorted(places) != list(range(len(self._experts))):
            refuse("logical_to_physical_map", places, f"a permutation of 0 to {len(self._experts) - 1}")
        self._placed = tuple(self._experts[places.index(place)] for place in range(len(places)))
        self._map = [torch.tensor(places, device=self._backend.device).unsqueeze(1)]

    def forward_native(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        return self.combine(hidden_states, *self.select(hidden_states, router_logits))

    def combine(self, hidden_states: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The sum over the chosen experts: hidden states [N, H], weights float32 and ids int64 [N, K] -> [N, H]."""
        if self.apply_router_weight_on_input:
            hidden_states = (hidden_states * weights).to(hidden_states.dtype)
            weights = torch.ones_like(weights)
        if self._map:
            ids = self._backend.ops.select_rows(self._map[0], ids.reshape(-1)).view(ids.shape)
        if self.tp.size > 1:
            return self._over_ranks(hidden_states, weights, ids)
        return self.quant_method.apply(self, hidden_states, weights, ids)

    def _over_ranks(self, hidden_states: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Every rank computes what its experts make of each token; all of them add that up, in the order of the slots,
        as one rank does."""
        chosen, slots = ids.flatten(), ids.shape[1]
        ranks = self.rank_of_expert[chosen]
        own = (ranks == self.tp.rank).nonzero().squeeze(1)
        products = hidden_states.new_zeros(len(chosen), hidden_states.shape[1])
        if len(own):
            rows = self._backend.ops.select_rows(hidden_states, own // slots)
            whole = weights.new_ones(len(own), 1)
            products[own] = self.quant_method.apply(self, rows, whole, (chosen[own] - self._held.start).unsqueeze(1))
        parts = self.tp.pick(products, ranks).view(len(ids), slots, -1).unbind(1)
        y = parts[0] * weights[:, :1]
        for slot in range(1, slots):
            y = y + parts[slot] * weights[:, slot : slot + 1]
        return y.to(hidden_states.dtype)

    def on_another_rank(self, expert: str) -> bool:
        """Whether the expert of this name is one of another rank."""
        return expert.isdecimal() and int(expert) < self.num_experts and int(expert) not in self._held

    def select(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights float32 [N, K] and ids int64 [N, K] of each token's experts."""
        if self.router is not None:
            return self.router(router_logits)
        if self.custom_routing_function is None:
            raise RuntimeError("a layer of experts has a router or a routing function")
        weights, ids = self.custom_routing_function(hidden_states, router_logits, self.top_k, self.renormalize)
        return weights.float(), ids.long()

    def expert_weights(self) -> ExpertWeights | None:
        """The weights of `placed_experts` for one call; None: the experts must be called one by one."""
        if self._has_replaced or self._is_watched():
            return None
        gate_up = _weights_of(self._placed, FIRST_LAYER[self.activation not in UNGATED])
        down = _weights_of(self._placed, "down_proj")
        known = self._weights
        if known is None or known.gate_up != gate_up or known.down != down:
            known = self._weights = _together(gate_up, down)
        return known

    def of_tokens(self) -> OfTokens | None:
        """Opens the adapters of some of the step's tokens; None: no token has an adapter that changes an expert."""
        rows = self.adapter_rows
        slots = None if rows is None else rows.slots
        if rows is None or slots is None:
            return None
        return lambda tokens: rows.of(slots[tokens])

    def stacked_parameter(self, expert: str, projection: str, last: str) -> tuple[str, str] | None:
        """The parameter, and the shard of it, that a checkpoint's tensor of one expert fills; None: the expert's own.

        For methods whose `create_weights` registers stacked parameters: "w13_" and "w2_" with the tensor's last name.
        """
        if self._experts or projection not in _STACKED or not expert.isdecimal():
            return None
        stack, shard = _STACKED[projection]
        return f"{stack}_{last}", f"{shard}:{expert}"

    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: str) -> int:
        """Copy one expert's tensor into a stacked parameter: shard "w1:3" is the gate of expert 3.

        Returns how many elements were filled; raises ValueError if the shapes disagree.
        """
        which, _, expert = shard_id.partition(":")
        if int(expert) >= len(param):
            raise ValueError(f"is of expert {expert}, the model has {len(param)}")
        target = param.data[int(expert)]
        if which != "w2":
            target = target.chunk(2)[0 if which == "w1" else 1]
        if loaded.shape != target.shape:
            raise ValueError(f"has shape {list(loaded.shape)}, the model needs {list(target.shape)} of it")
        target.copy_(loaded)
        return target.numel()

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, top_k={self.top_k}, activation={self.activation!r}"


def _check(num_experts: int, top_k: int, activation: str, weight_on_input: bool) -> None:
    if not 1 <= top_k <= num_experts:
        refuse("top_k", top_k, f"from 1 to num_experts, {num_experts}")
    if activation not in ACTIVATIONS:
        refuse("activation", activation, f"one of {', '.join(map(repr, ACTIVATIONS))}")
    if weight_on_input and top_k != 1:
        refuse("top_k", top_k, "1 with apply_router_weight_on_input")


# As the operation `experts` names them; "swigluoai" has a limit.
ACTIVATIONS: dict[str, Callable[[float], nn.Module]] = {
    "silu": lambda limit: SiluAndMul(),
    "gelu": lambda limit: GeluAndMul(),
    "gelu_tanh": lambda limit: GeluAndMul("tanh"),
    "swigluoai": lambda limit: SiluAndMulWithClamp(limit, alpha=SWIGLUOAI_ALPHA, beta=1.0),
    "relu2_no_mul": lambda limit: ReLUSquaredActivation(),
}
# Whether there is a gate -> the name of the linear layer that reads what goes in.
FIRST_LAYER = {True: "gate_up_proj", False: "up_proj"}


class Expert(Patchable):
    """One expert: down(act(gate(x)) * up(x)), of which a rank has its part of the channels between.

    Names, shards and quantization are those of any linear layer. Called only where the operation `experts` is not.

    Args:
        is_gated: False: down(act(up(x))).
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        act_fn: nn.Module,
        *,
        is_gated: bool = True,
        bias: bool,
        params_dtype: torch.dtype | None,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        types: LinearArguments = {
            "params_dtype": params_dtype,
            "quant_config": quant_config,
            "tp": SINGLE,
            "return_bias": False,
        }
        self._first = FIRST_LAYER[is_gated]
        path, inner = f"{prefix}.{self._first}", intermediate_size
        if is_gated:
            self.gate_up_proj = MergedColumnParallelLinear(hidden_size, [inner, inner], bias, prefix=path, **types)
        else:
            self.up_proj = ColumnParallelLinear(hidden_size, inner, bias, prefix=path, **types)
        self.down_proj = RowParallelLinear(
            intermediate_size,
            hidden_size,
            bias,
            prefix=f"{prefix}.down_proj",
            **types,
        )
        self._act_fn = [act_fn]  # no child: the operation `experts` computes it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self._act_fn[0](getattr(self, self._first)(x)))


def _weights_of(experts: Sequence[Expert], name: str) -> tuple[Weight | None, ...]:
    """What the experts' layers of this name multiply with.

    Asked of thousands of layers in a step: `_modules` is read where `getattr` takes four times as long.
    """
    return tuple([_weight_of(cast(LinearBase, expert._modules[name])) for expert in experts])


def _weight_of(layer: LinearBase) -> Weight | None:
    """None: only the layer's method knows, or somebody patched it. `isinstance` would ask an ABC, which is slow."""
    weight, method = layer.packed_weight, layer.quant_method
    if weight is None or type(method).apply is not PackedLinearMethod.apply or "apply" in method.__dict__:
        return None
    return weight if weight.bias is layer.bias else cast(PackedLinearMethod, method).weight_with(layer, layer.bias)


def _together(gate_up: Sequence[Weight | None], down: Sequence[Weight | None]) -> ExpertWeights | None:
    """None where only the layers' methods know some of them. Patterns may quantize some in another way than others."""
    first, last = tuple(filter(None, gate_up)), tuple(filter(None, down))
    return ExpertWeights(first, last) if len(first) == len(gate_up) and len(last) == len(down) else None


class ExpertsMethod(KernelOp, FusedMoEMethodBase):
    """Computes with the weights of the layer's `experts`, which are pairs of linear layers.

    Where those cannot be given to one operation (they are hooked, or an adapter of a token changes them) it calls them
    one by one, with the same bits.
    """

    operations = ("experts",)

    def __init__(self, *, enforce_enable: bool = False) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.invariant = self.backend.computes("experts", "select_experts")
        self.kernel = self.backend.source("experts")
        self._place = construction().weights

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
        """Nothing: the linear layers of each expert have made theirs."""

    def apply(self, layer: Any, *inputs: torch.Tensor) -> Any:
        """(layer, x, weights, ids) -> float [N, H]. With a function alone it is the `apply` of nn.Module."""
        return self(layer, *inputs) if inputs else nn.Module.apply(self, layer)

    def compute(
        self, ops: Operations, layer: FusedMoE, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        of_tokens = layer.of_tokens()
        weights = layer.expert_weights() if of_tokens is None else None
        if weights is None:
            return over_experts(x, topk_ids, topk_weights, layer.placed_experts, layer.hidden_size, of_tokens)
        if self._place.is_slow:
            chosen = topk_ids.unique().tolist()
            self._place.fetch(each.data for index in chosen for each in (weights.gate_up[index], weights.down[index]))
        return ops.experts(x, topk_ids, topk_weights, weights, layer.activation, layer.swiglu_limit)


@CustomOp.register("unquantized_fused_moe")
class UnquantizedFusedMoEMethod(ExpertsMethod):
    """Experts in their storage type (float32, bfloat16, float16)."""


class FusedMoEPrepareAndFinalize:
    """What happens to tokens before and after the experts; as it is, nothing. One that sends them to the ranks that
    hold their experts overrides both.

    Attributes:
        invariant: a token's bits do not depend on the others.
    """

    invariant = True

    def prepare(
        self, layer: FusedMoE, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, object]:
        """x float32 [N, H], weights float32 and ids int64 [N, K] -> the same of the M rows to compute here, and
        whatever `finalize` needs to know."""
        return x, topk_weights, topk_ids, None

    def finalize(self, layer: FusedMoE, y: torch.Tensor, state: object) -> torch.Tensor:
        """The experts' sums float32 [M, H] -> [N, H]."""
        return y


class FusedMoEExperts:
    """What computes the rows that were prepared; as it is, the operation `experts`.

    Attributes:
        invariant: a token's bits do not depend on the others.
    """

    invariant = True

    def apply(
        self,
        method: ExpertsMethod,
        ops: Operations,
        layer: FusedMoE,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
    ) -> torch.Tensor:
        """x [M, H], weights and ids [M, K] -> the weighted sum of each row's experts, [M, H]; called by `method`."""
        return ExpertsMethod.compute(method, ops, layer, x, topk_weights, topk_ids)


@CustomOp.register("modular_fused_moe")
class FusedMoEModularMethod(ExpertsMethod):
    """The method of a layer of experts, in parts.

    A quantization config returns one from `get_quant_method` for a layer whose `quant_kind` is "moe", or it is set as
    the layer's `quant_method`. The weights are those of the layer's experts, however these are quantized.

    Args:
        prepare_finalize, fused_experts: the parts; None: as they are.
    """

    def __init__(
        self,
        prepare_finalize: FusedMoEPrepareAndFinalize | None = None,
        fused_experts: FusedMoEExperts | None = None,
        *,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.prepare_finalize = prepare_finalize or FusedMoEPrepareAndFinalize()
        self.fused_experts = fused_experts or FusedMoEExperts()
        self.invariant = self.invariant and self.prepare_finalize.invariant and self.fused_experts.invariant

    def compute(
        self, ops: Operations, layer: FusedMoE, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        x, topk_weights, topk_ids, state = self.prepare_finalize.prepare(layer, x, topk_weights, topk_ids)
        y = self.fused_experts.apply(self, ops, layer, x, topk_weights, topk_ids)
        return self.prepare_finalize.finalize(layer, y, state)

    def extra_repr(self) -> str:
        return f"{type(self.prepare_finalize).__name__}, {type(self.fused_experts).__name__}"


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
