"""Attention without keys and values of its own: its queries read the KV cache of an earlier layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from llm.base.watch import Patchable
from llm.forward import ForwardBatch
from llm.layers.attention import Attention
from llm.layers.linear import ColumnParallelLinear, RowParallelLinear
from llm.models.config_reader import ConfigReader
from llm.models.decoder.attention import AttentionConfig
from llm.models.decoder.part import BuildContext, PartConfig


@dataclass(frozen=True)
class SharedKVConfig(PartConfig):
    """`attention` of the layer whose keys and values are read, and the index of its state."""

    attention: AttentionConfig
    state: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "rope", self.attention.rope)

    def build(self, context: BuildContext, prefix: str) -> nn.Module:
        return SharedKVAttention(self, context, prefix)


class SharedKVAttention(Patchable):
    """Queries, their norm and rotary embedding, and attention over what the other layer wrote in this step."""

    def __init__(self, config: SharedKVConfig, context: BuildContext, prefix: str) -> None:
        super().__init__()
        of, tp = config.attention, context.tp
        heads, size = of.heads, of.heads.size
        hidden, width = context.hidden_size, heads.query * size
        linear = context.linear
        self.q_proj = ColumnParallelLinear(hidden, width, bias=of.qkv_bias, prefix=f"{prefix}.q_proj", **linear)
        self.o_proj = RowParallelLinear(width, hidden, bias=of.out_bias, prefix=f"{prefix}.o_proj", **linear)
        self.head_size, self.state = size, config.state
        self.q_norm = None if of.qk_norm is None else of.qk_norm.build(size, context)
        self.rotary_emb = None if of.rope is None else context.rotary(size, of.rope, not of.rope_interleaved)
        self.attn = Attention(
            tp.share("num_attention_heads", heads.query),
            heads.key_value_on_rank(tp),
            size,
            layer_index=config.state,
            scale=size**-0.5 if of.scale is None else of.scale,
            sliding_window=of.sliding_window,
            soft_cap=of.soft_cap,
        )

    def forward(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        query = self.q_proj(hidden)
        if self.q_norm is not None:
            query = self.q_norm(query.view(query.shape[0], -1, self.head_size)).view(query.shape)
        if self.rotary_emb is not None:
            query, _ = self.rotary_emb(batch.positions, query, query[:, :0])
        return self.o_proj(self.attn.attend(query, batch))


def read_shared(reader: ConfigReader, own: Sequence[AttentionConfig], default: int) -> list[PartConfig]:
    """The layers' attention, of which the last `num_kv_shared_layers` read the keys and values of the last layer before
    them with their window."""
    shared = reader.integer("num_kv_shared_layers", default)
    first = len(own) - shared
    if not 0 < first <= len(own):
        raise reader.error("num_kv_shared_layers", shared, f"an integer from 0 to {len(own) - 1}")
    last = {part.sliding_window: index for index, part in enumerate(own[:first])}
    if any(part.sliding_window not in last for part in own):
        raise reader.error("num_kv_shared_layers", shared, "fewer: no layer before them is of their type")
    return [*own[:first], *(SharedKVConfig(part, last[part.sliding_window]) for part in own[first:])]


def connect_shared(layers: Sequence[nn.Module]) -> tuple[str, ...]:
    """Layers that read another's cache get its backend, which knows the static scales of a quantized cache.

    Each of the other layers has one state, so states are numbered as those layers are. Returns what checkpoints store
    of the readers' own keys and values, in models by themselves and in multimodal ones.
    """
    parts = [layer.get_submodule("self_attn") for layer in layers]
    readers = {index: part for index, part in enumerate(parts) if isinstance(part, SharedKVAttention)}
    for part in readers.values():
        source = parts[part.state].get_submodule("attn")
        part.attn.backend = cast("Attention", source).backend
    outer = ("model", "model.language_model", "language_model.model")
    names = ("k_proj", "v_proj", "k_norm", "v_norm")
    return tuple(f"{model}.layers.{index}.self_attn.{name}" for model in outer for index in readers for name in names)
