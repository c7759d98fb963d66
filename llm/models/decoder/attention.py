"""Grouped-query attention with one projection of query, key and value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from llm.base.errors import UnsupportedModelError
from llm.forward import ForwardBatch, KVCacheSpec
from llm.layers.attention import Attention
from llm.layers.linear import QKVParallelLinear, RowParallelLinear
from llm.layers.parallel import TensorParallel
from llm.layers.rotary import RopeParameters
from llm.models.decoder.part import BuildContext, NormConfig, PartConfig


@dataclass(frozen=True)
class Heads:
    """Numbers of heads of the whole model; the head size `size` is independent of hidden_size / query heads."""

    query: int
    key_value: int
    size: int

    def __post_init__(self) -> None:
        if self.query % self.key_value:
            raise UnsupportedModelError(
                f"config.json: num_attention_heads {self.query} is not a multiple of num_key_value_heads "
                f"{self.key_value}."
            )

    def key_value_on_rank(self, tp: TensorParallel) -> int:
        """Key heads per rank as `QKVParallelLinear` splits them: at least one, if there are more ranks than heads."""
        return max(1, self.key_value // tp.size)


@dataclass(frozen=True)
class AttentionConfig(PartConfig):
    """Self-attention over a paged KV cache.

    Attributes:
        rope: None: no rotary embedding.
        sliding_window: how many positions a token sees, itself included; None: all.
        qkv_bias, out_bias: which projections have a bias.
        qk_norm: normalises queries and keys before the rotary embedding, per head or over all heads.
        scale: factor on the scores; None: head size ** -0.5.
        soft_cap: scores become cap * tanh(score / cap).
    """

    heads: Heads
    rope: RopeParameters | None = None
    sliding_window: int | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: NormConfig | None = None
    qk_norm_over: Literal["head", "all heads"] = "head"
    scale: float | None = None
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        if self.rope is not None:
            check_rope(self.rope, int(self.heads.size * self.rope.partial_rotary_factor))

    def build(self, context: BuildContext, prefix: str) -> nn.Module:
        return DecoderAttention(self, context, prefix)

    def states(self, dtype: torch.dtype, tp: TensorParallel) -> tuple[KVCacheSpec, ...]:
        return (KVCacheSpec(self.heads.key_value_on_rank(tp), self.heads.size, dtype, self.sliding_window),)


class DecoderAttention(nn.Module):
    """Projections, norms of queries and keys, rotary embedding and attention of one layer."""

    def __init__(self, config: AttentionConfig, context: BuildContext, prefix: str) -> None:
        super().__init__()
        heads, size, tp = config.heads, config.heads.size, context.tp
        self.qkv_proj = QKVParallelLinear(
            context.hidden_size,
            size,
            heads.query,
            heads.key_value,
            bias=config.qkv_bias,
            prefix=f"{prefix}.qkv_proj",
            **context.common,
        )
        self.o_proj = RowParallelLinear(
            heads.query * size, context.hidden_size, bias=config.out_bias, prefix=f"{prefix}.o_proj", **context.common
        )
        # The heads of this rank.
        num_heads, num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.tp, self.head_size, self.kv_head_replicas = tp, size, self.qkv_proj.num_kv_head_replicas
        self.sizes = [num_heads * size, num_kv_heads * size, num_kv_heads * size]
        self.q_norm = self.k_norm = None
        self.norm_per_head = config.qk_norm_over == "head"
        if config.qk_norm is not None:
            # A norm over all heads has the whole model's weights on every rank.
            widths = (size, size) if self.norm_per_head else (heads.query * size, heads.key_value * size)
            self.q_norm, self.k_norm = (config.qk_norm.build(width, context) for width in widths)
        self.rotary_emb = None if config.rope is None else context.rotary(size, config.rope)
        self.attn = Attention(
            num_heads,
            num_kv_heads,
            size,
            layer_index=context.next_state(),
            scale=size**-0.5 if config.scale is None else config.scale,
            sliding_window=config.sliding_window,
            soft_cap=config.soft_cap,
        )

    def forward(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        query, key, value = self.qkv_proj(hidden).split_with_sizes(self.sizes, dim=-1)
        if self.q_norm is not None and self.k_norm is not None:
            query = self._normalised(self.q_norm, query, 1)
            key = self._normalised(self.k_norm, key, self.kv_head_replicas)
        if self.rotary_emb is not None:
            query, key = self.rotary_emb(batch.positions, query, key)
        return self.o_proj(self.attn(query, key, value, batch))

    def _normalised(self, norm: nn.Module, x: torch.Tensor, replicas: int) -> torch.Tensor:
        """`replicas`: how many consecutive ranks have the same heads."""
        if self.norm_per_head:
            return norm(x.reshape(x.shape[0], -1, self.head_size)).view(x.shape)
        return norm(x) if self.tp.size == 1 else self._normalised_over_ranks(norm, x, replicas)

    def _normalised_over_ranks(self, norm: nn.Module, x: torch.Tensor, replicas: int) -> torch.Tensor:
        """Normalise over the heads of all ranks; returns this rank's heads."""
        width = x.shape[-1]
        parts = self.tp.all_gather(x).unflatten(-1, (self.tp.size, width))
        whole = norm(parts[:, ::replicas].flatten(1))
        return whole.narrow(-1, self.tp.rank // replicas * width, width)


def check_rope(rope: RopeParameters, rotary_dim: int) -> None:
    if rotary_dim % 2:
        raise UnsupportedModelError(f"config.json: {rotary_dim} rotated channels per head is odd, must be even.")
    divisors = {len(rope.short_factor), len(rope.long_factor)}
    if rope.rope_type == "longrope" and divisors != {rotary_dim // 2}:
        raise UnsupportedModelError(
            f"config.json: short_factor and long_factor need {rotary_dim // 2} numbers, have {sorted(divisors)}."
        )
