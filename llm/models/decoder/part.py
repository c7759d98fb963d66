"""The interface of a layer's parts, and the context they are built in.

A part is attention, an MLP or a recurrent mixer. Its config builds its module and declares the states that the module
keeps between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar, cast

import torch
from torch import nn

from llm.forward import StateSpec
from llm.layers.linear import LayerArguments, LinearArguments
from llm.layers.norm import GemmaRMSNorm, LayerNorm, LayerNorm1P, RMSNorm
from llm.layers.parallel import TensorParallel
from llm.layers.rotary import RopeParameters, RotaryEmbedding
from llm.models.interface import BuildOptions

NormClass = type[RMSNorm] | type[GemmaRMSNorm] | type[LayerNorm] | type[LayerNorm1P]
M = TypeVar("M", bound=nn.Module)


class TableArguments(LayerArguments):
    """Those of embeddings and LM heads."""

    padding_size: int


class BuildContext:
    """The options of one model's build, and what its parts share: rotary tables and the numbering of states.

    Attributes:
        num_states: number of states numbered so far.
    """

    def __init__(self, options: BuildOptions, hidden_size: int) -> None:
        self.options = options
        self.hidden_size = hidden_size
        self.num_states = 0
        self._shared: dict[Hashable, nn.Module] = {}

    @property
    def tp(self) -> TensorParallel:
        return self.options.tp

    @property
    def common(self) -> LayerArguments:
        options = self.options
        return {"params_dtype": options.params_dtype, "quant_config": options.quant_config, "tp": options.tp}

    @property
    def linear(self) -> LinearArguments:
        """`common` of linear layers, which return y alone."""
        return {**self.common, "return_bias": False}

    @property
    def table(self) -> TableArguments:
        """`common` of embeddings and LM heads, whose rows are not padded here: kernels pad."""
        return {**self.common, "padding_size": 1}

    def next_state(self) -> int:
        """The index of the next state in `ForwardBatch.states`; call it in the order of `PartConfig.states`."""
        self.num_states += 1
        return self.num_states - 1

    def shared_state(self) -> int:
        """The index of the one state of a model whose layers share it."""
        self.num_states = 1
        return 0

    def shared(self, key: Hashable, make: Callable[[], M]) -> M:
        """One module for all layers with this key."""
        if key not in self._shared:
            self._shared[key] = make()
        return cast("M", self._shared[key])

    def rotary(self, head_size: int, rope: RopeParameters, is_neox_style: bool = True) -> RotaryEmbedding:
        """One module, with one table, for all layers with this rope."""
        longest, key = self.options.max_model_len, (head_size, rope, is_neox_style)
        return self.shared(key, lambda: RotaryEmbedding.of(head_size, longest, rope, is_neox_style))


class PartConfig:
    """The config of one part of a layer; frozen dataclasses derive from it.

    The module it builds has `forward(hidden, batch)`: hidden states float [N, hidden_size] of the step's tokens and the
    `ForwardBatch` -> the part's output, of the same shape, which is added to the residual stream.

    Attributes:
        module_name: of its module in a layer, where it is the part that mixes tokens.
        rope: the part's rotary embedding; None: it has none.
    """

    module_name: ClassVar[str] = "self_attn"
    rope: RopeParameters | None = None

    @property
    def experts(self) -> int:
        """How many experts its module has."""
        return 0

    def build(self, context: BuildContext, prefix: str) -> nn.Module:
        """The module; `prefix` is its path in the model."""
        raise NotImplementedError

    def states(self, dtype: torch.dtype, tp: TensorParallel) -> Sequence[StateSpec]:
        """The module's states on one rank, one per call of `BuildContext.next_state`; `dtype`: of the KV cache."""
        return ()


@dataclass(frozen=True)
class NormConfig:
    """A norm over the last dimension, of a class in `llm.layers.norm`; `LayerNorm` may lack its weight or its bias.

    `weight_offset` is of `GemmaRMSNorm`: the checkpoint stores weight - weight_offset.
    """

    eps: float
    kind: NormClass = RMSNorm
    has_weight: bool = True
    has_bias: bool = True
    weight_offset: float = 1.0

    def build(self, size: int, context: BuildContext) -> nn.Module:
        has = {"has_weight": self.has_weight, "has_bias": self.has_bias}
        lacking = {name: False for name, value in has.items() if not value}
        if self.kind is GemmaRMSNorm:
            return GemmaRMSNorm(size, self.eps, context.options.params_dtype, weight_offset=self.weight_offset)
        return self.kind(size, self.eps, dtype=context.options.params_dtype, **lacking)
