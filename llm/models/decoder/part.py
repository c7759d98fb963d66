"""What every part of a layer promises, and what it is built with.

Owns `PartConfig`, `NormConfig` and `BuildContext`. A part is attention, a feed-forward, a recurrent mixer: its config
builds its module and says which state the module keeps between steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import nn

from llm.forward import StateSpec
from llm.layers.norm import GemmaRMSNorm, LayerNorm, RMSNorm
from llm.layers.parallel import TensorParallel
from llm.layers.rotary import RopeParameters, RotaryEmbedding
from llm.models.interface import BuildOptions
from llm.quantization.base import QuantizationConfig

NormClass = type[RMSNorm] | type[GemmaRMSNorm] | type[LayerNorm]


class LayerArguments(TypedDict):
    """What every linear layer and embedding of a model is built with."""

    params_dtype: torch.dtype
    quant_config: QuantizationConfig | None
    tp: TensorParallel


class BuildContext:
    """What the parts of one model are built with, and what they share: rotary tables and the numbering of states.

    Attributes:
        num_states: how many states were numbered so far.
    """

    def __init__(self, options: BuildOptions, hidden_size: int) -> None:
        self.options = options
        self.hidden_size = hidden_size
        self.num_states = 0
        self._rotary: dict[tuple[int, RopeParameters], RotaryEmbedding] = {}

    @property
    def tp(self) -> TensorParallel:
        return self.options.tp

    @property
    def common(self) -> LayerArguments:
        options = self.options
        return {"params_dtype": options.params_dtype, "quant_config": options.quant_config, "tp": options.tp}

    def next_state(self) -> int:
        """Where the next state of the model lies in `ForwardBatch`; taken in the order of `PartConfig.states`."""
        self.num_states += 1
        return self.num_states - 1

    def rotary(self, head_size: int, rope: RopeParameters) -> RotaryEmbedding:
        """One module, and so one table, for all layers with this rope."""
        key = head_size, rope
        if key not in self._rotary:
            self._rotary[key] = RotaryEmbedding(head_size, self.options.max_model_len, rope)
        return self._rotary[key]


class PartConfig:
    """The numbers of one part of a layer; frozen dataclasses derive from it.

    The module it builds has `forward(hidden, batch)`: hidden states float [N, hidden_size] of the step's tokens and the
    `ForwardBatch` -> what is added to the residual stream, of the same shape.

    Attributes:
        rope: what the part rotates positions in by; None: it does not.
    """

    rope: RopeParameters | None = None

    def build(self, context: BuildContext, prefix: str) -> nn.Module:
        """The module, whose path in the model is `prefix`."""
        raise NotImplementedError

    def states(self, dtype: torch.dtype, tp: TensorParallel) -> Sequence[StateSpec]:
        """What the module keeps on one rank, `dtype` being that of the KV cache: one per `BuildContext.next_state`."""
        return ()


@dataclass(frozen=True)
class NormConfig:
    """A norm over the last dimension, of a class in `llm.layers.norm`."""

    eps: float
    kind: NormClass = RMSNorm

    def build(self, size: int, context: BuildContext) -> nn.Module:
        return self.kind(size, self.eps, dtype=context.options.params_dtype)
