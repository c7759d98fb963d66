"""Latent attention: low-rank projections, a part of each head rotated, one vector per token kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from llm.forward import LatentCacheSpec
from llm.layers.latent_attention import LATENT_SCALES, LatentProjection, MLAModules, MultiHeadLatentAttentionWrapper
from llm.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from llm.layers.parallel import TensorParallel
from llm.layers.rotary import RopeParameters, yarn_score_factor
from llm.models.config_reader import ConfigReader
from llm.models.decoder.attention import check_rope
from llm.models.decoder.part import BuildContext, NormConfig, PartConfig

# Of the norms inside, in every family that transformers has, whatever rms_norm_eps says.
_INNER_NORM = NormConfig(1e-6)


@dataclass(frozen=True)
class LatentAttentionConfig(PartConfig):
    """Self-attention over a paged cache of latents (`llm.layers.latent_attention`).

    Attributes:
        heads: of queries.
        q_lora_rank: channels that queries are computed from; None: the hidden state's.
        kv_lora_rank: channels of the latent.
        qk_nope_head_dim, qk_rope_head_dim: channels of a head's query and key, without and with rope.
        v_head_dim: channels of a head's value.
        rope: of the `qk_rope_head_dim` channels; its mscale_all_dim scales scores too. None: they are not rotated.
        bias: of the projections to latents and of the output.
        is_neox_style: see `RotaryEmbedding`.
    """

    heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope: RopeParameters | None
    bias: bool = False
    is_neox_style: bool = False

    def __post_init__(self) -> None:
        if self.rope is not None:
            check_rope(self.rope, self.qk_rope_head_dim)

    @property
    def scale(self) -> float:
        plain = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        return plain if self.rope is None else plain * yarn_score_factor(self.rope)

    def build(self, context: BuildContext, prefix: str) -> nn.Module:
        modules = self._modules(context, prefix)
        return MultiHeadLatentAttentionWrapper(
            context.hidden_size,
            modules.kv_b_proj.num_heads,
            self.scale,
            self.qk_nope_head_dim,
            self.qk_rope_head_dim,
            self.v_head_dim,
            self.q_lora_rank,
            self.kv_lora_rank,
            modules,
            layer_index=context.next_state(),
            prefix=prefix,
        )

    def states(self, dtype: torch.dtype, tp: TensorParallel) -> tuple[LatentCacheSpec, ...]:
        """All of it on every rank: all heads read all of it."""
        return (LatentCacheSpec(self.kv_lora_rank + self.qk_rope_head_dim, dtype, scales=LATENT_SCALES),)

    def _modules(self, context: BuildContext, prefix: str) -> MLAModules:
        hidden, linear, rank = context.hidden_size, context.linear, self.q_lora_rank
        queries = self.heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)

        def by_heads(name: str, size: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(size, queries, bias=False, prefix=f"{prefix}.{name}", **linear)

        def to_latent(name: str, size: int) -> ReplicatedLinear:
            return ReplicatedLinear(hidden, size, bias=self.bias, prefix=f"{prefix}.{name}", **linear)

        return MLAModules(
            q_proj=by_heads("q_proj", hidden) if rank is None else None,
            q_a_proj=None if rank is None else to_latent("q_a_proj", rank),
            q_a_layernorm=None if rank is None else _INNER_NORM.build(rank, context),
            q_b_proj=None if rank is None else by_heads("q_b_proj", rank),
            kv_a_proj_with_mqa=to_latent("kv_a_proj_with_mqa", self.kv_lora_rank + self.qk_rope_head_dim),
            kv_a_layernorm=_INNER_NORM.build(self.kv_lora_rank, context),
            kv_b_proj=LatentProjection(
                self.kv_lora_rank,
                self.heads,
                self.qk_nope_head_dim,
                self.v_head_dim,
                prefix=f"{prefix}.kv_b_proj",
                **context.common,
            ),
            rotary_emb=None
            if self.rope is None
            else context.rotary(self.qk_rope_head_dim, self.rope, self.is_neox_style),
            o_proj=RowParallelLinear(
                self.heads * self.v_head_dim,
                hidden,
                bias=self.bias,
                prefix=f"{prefix}.o_proj",
                **linear,
            ),
        )


def read_latent_attention(
    reader: ConfigReader,
    rope: RopeParameters | None,
    *,
    q_lora_rank: int | None = 1536,
    kv_lora_rank: int = 512,
    qk_nope_head_dim: int = 128,
    qk_rope_head_dim: int = 64,
    v_head_dim: int = 128,
    is_neox_style: bool = False,
) -> LatentAttentionConfig:
    """From the keys that all families share; the arguments are what a missing one stands for."""
    heads = reader.positive("num_attention_heads")
    plain = reader.positive("qk_nope_head_dim", qk_nope_head_dim)
    rotated = reader.positive("qk_rope_head_dim", qk_rope_head_dim)
    # What transformers derives and writes.
    reader.expect("num_key_value_heads", heads)
    reader.expect("head_dim", rotated)
    reader.expect("qk_head_dim", plain + rotated)
    return LatentAttentionConfig(
        heads,
        _rank(reader, q_lora_rank),
        reader.positive("kv_lora_rank", kv_lora_rank),
        plain,
        rotated,
        reader.positive("v_head_dim", v_head_dim),
        rope,
        bias=reader.boolean("attention_bias", False),
        is_neox_style=is_neox_style,
    )


def _rank(reader: ConfigReader, default: int | None) -> int | None:
    """null says that queries have no low rank."""
    rank = reader.optional_positive("q_lora_rank", default)
    if rank is not None and rank < 1:
        raise reader.error("q_lora_rank", rank, "a positive integer or null")
    return rank
