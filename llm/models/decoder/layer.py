"""How the parts of a layer and its norms are connected to the residual stream.

Another arrangement (three parts in sequence) is another `Norms` with its own `DecoderLayer`, not a branch in one of
these.

A layer takes and returns a pair: the output of the last part, and the residual stream before it, None at the first
layer and where the stream itself is normalised. The next norm adds the two and normalises the sum in one pass over
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from llm.base.watch import Patchable
from llm.forward import ForwardBatch, StateSpec
from llm.layers.parallel import TensorParallel
from llm.models.decoder.part import BuildContext, NormConfig, PartConfig

Stream = tuple[torch.Tensor, torch.Tensor | None]


def add_norm(norm: nn.Module, hidden: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(hidden + residual), hidden + residual): what enters the next part, and the stream that it adds to."""
    return (norm(hidden), hidden) if residual is None else norm(hidden, residual)


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One layer: its attention or other token mixer, its MLP, and the norms that connect them.

    A layer with further parts derives from it, names them in `parts` and has its own `Norms`.
    """

    attention: PartConfig | None = None
    mlp: PartConfig | None = None
    norms: Norms

    @property
    def parts(self) -> Mapping[str, PartConfig]:
        """Module name in the layer -> part, in the order in which they are built."""
        mixer = {} if self.attention is None else {self.attention.module_name: self.attention}
        return mixer if self.mlp is None else {**mixer, "mlp": self.mlp}

    def states(self, dtype: torch.dtype, tp: TensorParallel) -> Sequence[StateSpec]:
        return [spec for part in self.parts.values() for spec in part.states(dtype, tp)]

    def build(self, context: BuildContext, prefix: str) -> DecoderLayer:
        return self.norms.build(self, context, prefix)


@dataclass(frozen=True, kw_only=True)
class MixerLayer(LayerConfig):
    """A layer of one part, which is called mixer whatever it is."""

    @property
    def parts(self) -> Mapping[str, PartConfig]:
        (part,) = super().parts.values()
        return {"mixer": part}


class Norms:
    """The norms of a layer and their arrangement; frozen dataclasses derive from it.

    Attributes:
        layer: makes the layer of (its config, the norms, the context, its path).
    """

    layer: ClassVar[Callable[..., DecoderLayer]]

    def build(self, layer: LayerConfig, context: BuildContext, prefix: str) -> DecoderLayer:
        return type(self).layer(layer, self, context, prefix)


class DecoderLayer(Patchable):
    """Builds the parts under their names; a subclass adds norms and the forward pass.

    Shapes: hidden and residual float [N, hidden_size]; no residual at the first layer.

    Attributes:
        mixer_name: of the part that mixes tokens, attention or a recurrence.
        streams: how many residual streams there are, side by side in the channels of `hidden`.
    """

    self_attn: nn.Module
    mlp: nn.Module
    streams: int = 1

    def __init__(self, layer: LayerConfig, context: BuildContext, prefix: str) -> None:
        super().__init__()
        for name, part in layer.parts.items():
            self.add_module(name, part.build(context, f"{prefix}.{name}"))
        self.mixer_name = "self_attn" if layer.attention is None else layer.attention.module_name

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch) -> Stream:
        raise NotImplementedError


class PreNormLayer(DecoderLayer):
    def __init__(self, layer: LayerConfig, norms: PreNorms, context: BuildContext, prefix: str) -> None:
        super().__init__(layer, context, prefix)
        self.input_layernorm = norms.norm.build(context.hidden_size, context)
        self.post_attention_layernorm = norms.norm.build(context.hidden_size, context)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch) -> Stream:
        hidden, residual = add_norm(self.input_layernorm, hidden, residual)
        hidden = getattr(self, self.mixer_name)(hidden, batch)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden, batch), residual


@dataclass(frozen=True)
class PreNorms(Norms):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    layer: ClassVar[Callable[..., DecoderLayer]] = PreNormLayer
    norm: NormConfig


class OnePartLayer(DecoderLayer):
    def __init__(self, layer: LayerConfig, norms: OnePart, context: BuildContext, prefix: str) -> None:
        super().__init__(layer, context, prefix)
        (self.mixer_name,) = layer.parts
        self.input_layernorm = norms.norm.build(context.hidden_size, context)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch) -> Stream:
        hidden, residual = add_norm(self.input_layernorm, hidden, residual)
        return getattr(self, self.mixer_name)(hidden, batch), residual


@dataclass(frozen=True)
class OnePart(Norms):
    """x + part(norm(x)): a layer of one part, whichever it is."""

    layer = OnePartLayer
    norm: NormConfig


class ScaledPreNormLayer(PreNormLayer):
    def __init__(self, layer: LayerConfig, norms: ScaledPreNorms, context: BuildContext, prefix: str) -> None:
        super().__init__(layer, norms, context, prefix)
        self.multiplier = norms.multiplier

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch) -> Stream:
        hidden, residual = add_norm(self.input_layernorm, hidden, residual)
        hidden = getattr(self, self.mixer_name)(hidden, batch) * self.multiplier
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden, batch) * self.multiplier, residual


@dataclass(frozen=True)
class ScaledPreNorms(PreNorms):
    """`PreNorms` where the output of each part is multiplied by a constant."""

    layer = ScaledPreNormLayer
    multiplier: float


class PostNormLayer(DecoderLayer):
    def __init__(self, layer: LayerConfig, norms: PostNorms, context: BuildContext, prefix: str) -> None:
        super().__init__(layer, context, prefix)
        self.post_attention_layernorm = norms.norm.build(context.hidden_size, context)
        self.post_feedforward_layernorm = norms.norm.build(context.hidden_size, context)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch) -> Stream:
        residual = hidden if residual is None else hidden + residual
        residual = residual + self.post_attention_layernorm(self.self_attn(residual, batch))
        return self.post_feedforward_layernorm(self.mlp(residual, batch)), residual


@dataclass(frozen=True)
class PostNorms(Norms):
    """x + norm(attention(x)), then x + norm(mlp(x))."""

    layer = PostNormLayer
    norm: NormConfig


class ParallelNormLayer(DecoderLayer):
    def __init__(self, layer: LayerConfig, norms: ParallelNorms, context: BuildContext, prefix: str) -> None:
        super().__init__(layer, context, prefix)
        self.input_layernorm = norms.norm.build(context.hidden_size, context)
        self.post_attention_layernorm: nn.Module | None = None
        if norms.mlp_has_norm:
            self.post_attention_layernorm = norms.norm.build(context.hidden_size, context)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch) -> Stream:
        hidden, residual = add_norm(self.input_layernorm, hidden, residual)
        beside = hidden if self.post_attention_layernorm is None else self.post_attention_layernorm(residual)
        return self.self_attn(hidden, batch) + self.mlp(beside, batch), residual


@dataclass(frozen=True)
class ParallelNorms(Norms):
    """Parallel residual: x + attention(norm(x)) + mlp(norm(x)).

    Attributes:
        mlp_has_norm: the MLP has its own norm; False: both read the output of one norm.
    """

    layer = ParallelNormLayer
    norm: NormConfig
    mlp_has_norm: bool = False


class NormedSumLayer(PreNormLayer):
    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch) -> Stream:
        stream = hidden if residual is None else hidden + residual
        stream, _ = add_norm(self.input_layernorm, self.self_attn(stream, batch), stream)
        stream, _ = add_norm(self.post_attention_layernorm, self.mlp(stream, batch), stream)
        return stream, None


@dataclass(frozen=True)
class NormedSums(PreNorms):
    """The first transformers: x = norm(x + attention(x)), then norm(x + mlp(x)); the norms are in the stream."""

    layer = NormedSumLayer


class PreAndPostNormLayer(DecoderLayer):
    def __init__(self, layer: LayerConfig, norms: PreAndPostNorms, context: BuildContext, prefix: str) -> None:
        super().__init__(layer, context, prefix)
        before, size = norms.norm, context.hidden_size
        self.input_layernorm = before.build(size, context)
        self.post_attention_layernorm = (norms.after_attention or before).build(size, context)
        self.pre_feedforward_layernorm = before.build(size, context)
        self.post_feedforward_layernorm = (norms.after_mlp or before).build(size, context)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch) -> Stream:
        hidden, residual = add_norm(self.input_layernorm, hidden, residual)
        hidden = self.post_attention_layernorm(self.self_attn(hidden, batch))
        hidden, residual = self.pre_feedforward_layernorm(hidden, residual)
        return self.post_feedforward_layernorm(self.mlp(hidden, batch)), residual


@dataclass(frozen=True)
class PreAndPostNorms(Norms):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))).

    Attributes:
        after_attention, after_mlp: the norms behind the parts, where these are other ones; None: `norm`.
    """

    layer = PreAndPostNormLayer
    norm: NormConfig
    after_attention: NormConfig | None = None
    after_mlp: NormConfig | None = None
