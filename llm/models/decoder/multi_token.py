"""The layer behind a decoder's last one that predicts a second token: multi-token prediction.

It drafts tokens (`llm.runner.speculation.head`); no answer depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from llm.base.watch import Patchable
from llm.forward import ForwardBatch, StateSpec
from llm.layers.linear import ReplicatedLinear
from llm.layers.parallel import TensorParallel
from llm.models.decoder.layer import LayerConfig, add_norm
from llm.models.decoder.part import BuildContext, NormConfig

# Names in the module -> names behind `MultiTokenConfig.prefix` in DeepSeek's checkpoints, the shortest last.
_AS_LAYER = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
    "layers.0": "",
}


@dataclass(frozen=True)
class MultiTokenConfig:
    """A head for multi-token prediction, with one layer.

    Attributes:
        norm: of the embedding and the hidden state that come in, and of what goes out.
        prefix: of its weights in a checkpoint.
        as_layer: they have DeepSeek's names, one layer more than the decoder has; False: Qwen's.
    """

    layer: LayerConfig
    norm: NormConfig
    prefix: str
    as_layer: bool

    def states(self, dtype: torch.dtype, tp: TensorParallel) -> Sequence[StateSpec]:
        return self.layer.states(dtype, tp)

    def stored(self, name: str) -> str:
        """The checkpoint's name of a module of the head."""
        return ".".join(filter(None, (self.prefix, _AS_LAYER[name] if self.as_layer else name)))

    @property
    def renames(self) -> tuple[tuple[str, str], ...]:
        """As `CausalLM.renames`, for a head that is the model's `mtp`."""
        return tuple((self.stored(name), f"mtp.{name}") for name in _AS_LAYER) if self.as_layer else ()

    @property
    def left_out(self) -> tuple[str, ...]:
        """Copies of the model's own embedding and LM head."""
        return (f"{self.prefix}.embed_tokens", f"{self.prefix}.shared_head.head") if self.as_layer else ()


class MultiTokenHead(Patchable):
    """The hidden state of a position and the embedding of the token after it -> the token after that.

    Weights are looked up under the checkpoint's names: its quantization config speaks of those.
    """

    def __init__(self, config: MultiTokenConfig, context: BuildContext) -> None:
        super().__init__()
        size = context.hidden_size
        self.pre_fc_norm_embedding = config.norm.build(size, context)
        self.pre_fc_norm_hidden = config.norm.build(size, context)
        self.fc = ReplicatedLinear(2 * size, size, bias=False, prefix=config.stored("fc"), **context.linear)
        self.layers = nn.ModuleList([config.layer.build(context, config.stored("layers.0"))])
        self.norm = config.norm.build(size, context)
        self.carries_norm = not config.as_layer

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's hidden states [N, H], as `forward` takes them."""
        return hidden

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Float [N, H] twice -> (what the LM head takes, the hidden states for the next token), [N, H] each."""
        both = torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)), dim=-1)
        hidden, residual = self.layers[0](self.fc(both), None, batch)
        normed, carried = add_norm(self.norm, hidden, residual)
        return normed, normed if self.carries_norm else carried
