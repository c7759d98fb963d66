"""Grouped-query attention with one projection of query, key and value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from llm.base.construction import construction
from llm.base.watch import Patchable
from llm.errors import UnsupportedModelError
from llm.forward import ForwardBatch, KVCacheSpec
from llm.kernels.select import backend_of_construction
from llm.layers.attention import Attention, GatedQKVParallelLinear, OutputGate
from llm.layers.linear import QKVParallelLinear, RowParallelLinear
from llm.layers.norm import HeadsRMSNorm
from llm.layers.parallel import TensorParallel
from llm.layers.rotary import RopeParameters
from llm.models.decoder.part import BuildContext, NormConfig, PartConfig
from llm.quantization.unquantized import new_parameter


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
class QueryScale:
    """Queries at position p are scaled by 1 + beta log(1 + floor((p + first) / original)): Llama 4's attention
    temperature."""

    beta: float
    original: int
    first: int = 0

    def table(self, length: int) -> torch.Tensor:
        """float32 [length]: the factor at each position; computed in float64, so it does not depend on `length`."""
        turns = (torch.arange(length, dtype=torch.float64) + self.first).div(self.original, rounding_mode="floor")
        return (1 + self.beta * torch.log1p(turns)).float()


@dataclass(frozen=True)
class AttentionConfig(PartConfig):
    """Self-attention over a paged KV cache.

    Attributes:
        rope: None: no rotary embedding.
        rope_interleaved: channels 2i and 2i + 1 are a pair (GPT-J), not i and i + half (GPT-NeoX).
        sliding_window: how many positions a token sees, itself included; None: all.
        attention_chunk: a token sees only its own chunk of so many positions; None: all. Without a window.
        qkv_bias, out_bias: which projections have a bias.
        qkv_by_key_head: a fused tensor of the checkpoint has the rows of one key head's queries, of the key head and of
            its value head, then those of the next key head; False: all queries, all keys, all values.
        qkv_limit: queries, keys and values are clamped to [-limit, limit]; None: not clamped.
        qk_norm: normalises queries and keys: per head, all with one weight or each head with its own, or over all.
        v_norm: normalises values per head.
        qk_norm_after_rope: after the rotary embedding; False: before it.
        query_scale: factor on the queries that depends on the position; None: none.
        scale: factor on the scores; None: head size ** -0.5.
        soft_cap: scores become cap * tanh(score / cap).
        alibi_slopes: of all heads, see `alibi_slopes()`; only if `causal`.
        sinks: each head has a score for a key without a value, that takes a part of the softmax.
        causal: False: a token also sees those after it. All layers then share one state, which no later step reads.
        gated: the query projection has a gate for each head, whose sigmoid multiplies the head's output.
        input_size: channels that queries, keys and values are projected from; None: the hidden state's.
    """

    heads: Heads
    rope: RopeParameters | None = None
    sliding_window: int | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: NormConfig | None = None
    qk_norm_over: Literal["head", "own head", "all heads"] = "head"
    qk_norm_after_rope: bool = False
    v_norm: NormConfig | None = None
    rope_interleaved: bool = False
    qkv_by_key_head: bool = False
    qkv_limit: float | None = None
    query_scale: QueryScale | None = None
    scale: float | None = None
    soft_cap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None
    sinks: bool = False
    causal: bool = True
    gated: bool = False
    attention_chunk: int | None = None
    input_size: int | None = None

    def __post_init__(self) -> None:
        if self.rope is not None:
            check_rope(self.rope, self.rope.rotary_dim(self.heads.size))

    def build(self, context: BuildContext, prefix: str) -> nn.Module:
        return DecoderAttention(self, context, prefix)

    def states(self, dtype: torch.dtype, tp: TensorParallel) -> tuple[KVCacheSpec, ...]:
        heads = self.heads.key_value_on_rank(tp)
        if not self.causal:  # a window frees no block: all is of one step
            return (KVCacheSpec(heads, self.heads.size, torch.float32),)
        return (KVCacheSpec(heads, self.heads.size, dtype, self.sliding_window),)


class DecoderAttention(Patchable):
    """Projections, norms of queries and keys, rotary embedding and attention of one layer."""

    alibi_slopes: torch.Tensor | None

    def __init__(self, config: AttentionConfig, context: BuildContext, prefix: str) -> None:
        super().__init__()
        heads, size, tp = config.heads, config.heads.size, context.tp
        self.qkv_proj = (GatedQKVParallelLinear if config.gated else QKVParallelLinear)(
            config.input_size or context.hidden_size,
            size,
            2 * heads.query if config.gated else heads.query,
            heads.key_value,
            bias=config.qkv_bias,
            stored_by_key_head=config.qkv_by_key_head,
            prefix=f"{prefix}.qkv_proj",
            **context.linear,
        )
        self.o_proj = RowParallelLinear(
            heads.query * size,
            context.hidden_size,
            bias=config.out_bias,
            prefix=f"{prefix}.o_proj",
            **context.linear,
        )
        # The heads of this rank.
        num_heads, num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        num_heads = num_heads // 2 if config.gated else num_heads
        self.tp, self.head_size, self.kv_head_replicas = tp, size, self.qkv_proj.num_kv_head_replicas
        queries, keys = num_heads * size, num_kv_heads * size
        self.sizes = [queries, queries if config.gated else 0, keys, keys]
        self.output_gate = OutputGate() if config.gated else None
        self.qkv_limit = config.qkv_limit
        self._build_qk_norms(config, context)
        self.rotary_emb = (
            None if config.rope is None else context.rotary(size, config.rope, not config.rope_interleaved)
        )
        self.query_scale = None if config.query_scale is None else _query_scale(config.query_scale, context)
        self.sinks = new_parameter(torch.zeros(num_heads), self._load_sinks) if config.sinks else None
        self._build_alibi(config.alibi_slopes, num_heads)
        self.attn = Attention(
            num_heads,
            num_kv_heads,
            size,
            layer_index=context.next_state() if config.causal else context.shared_state(),
            scale=size**-0.5 if config.scale is None else config.scale,
            sliding_window=config.sliding_window,
            soft_cap=config.soft_cap,
            sinks=self.sinks,
            alibi_slopes=self.alibi_slopes,
            causal=config.causal,
            attention_chunk=config.attention_chunk,
        )

    def _build_alibi(self, slopes: tuple[float, ...] | None, num_heads: int) -> None:
        """The slopes of this rank's heads, float32 [heads]."""
        first = self.tp.rank * num_heads
        device = construction().device
        own = None if slopes is None else torch.tensor(slopes[first : first + num_heads], device=device)
        self.register_buffer("alibi_slopes", own, persistent=False)

    def _build_qk_norms(self, config: AttentionConfig, context: BuildContext) -> None:
        heads, size = config.heads, config.heads.size
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        self.norm_per_head = config.qk_norm_over == "head"
        self.v_norm = None if config.v_norm is None else config.v_norm.build(size, context)
        self.norms_first = not config.qk_norm_after_rope
        if config.qk_norm is not None and config.qk_norm_over == "own head":
            self.q_norm, self.k_norm = (
                HeadsRMSNorm(total, own, size, config.qk_norm.eps, context.options.params_dtype, part)
                for total, own, part in (
                    (heads.query, self.qkv_proj.num_heads, self.tp.rank),
                    (heads.key_value, self.qkv_proj.num_kv_heads, self.tp.rank // self.kv_head_replicas),
                )
            )
        elif config.qk_norm is not None:
            # A norm over all heads has the whole model's weights on every rank.
            widths = (size, size) if self.norm_per_head else (heads.query * size, heads.key_value * size)
            self.q_norm, self.k_norm = (config.qk_norm.build(width, context) for width in widths)

    def forward(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        qkv = self.qkv_proj(hidden)
        if self.qkv_limit is not None:
            qkv = qkv.clamp(-self.qkv_limit, self.qkv_limit)
        query, gate, key, value = qkv.split_with_sizes(self.sizes, dim=-1)
        if self.norms_first:
            query, key = self._qk_norms(query, key)
        if self.rotary_emb is not None:
            query, key = self.rotary_emb(batch.positions, query, key)
        if not self.norms_first:
            query, key = self._qk_norms(query, key)
        if self.query_scale is not None:
            query = (query * self.query_scale(batch.positions)).to(query.dtype)
        if self.v_norm is not None:
            value = self.v_norm(value.reshape(value.shape[0], -1, self.head_size)).view(value.shape)
        output = self.attn(query, key, value, batch)
        return self.o_proj(output if self.output_gate is None else self.output_gate(output, gate))

    def _qk_norms(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.q_norm is None or self.k_norm is None:
            return query, key
        return self._normalised(self.q_norm, query, 1), self._normalised(self.k_norm, key, self.kv_head_replicas)

    def _load_sinks(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: object = None) -> int:
        """This rank's heads."""
        count = param.numel()
        if list(loaded.shape) != [count * self.tp.size]:
            raise ValueError(f"has shape {list(loaded.shape)}, the model needs {[count * self.tp.size]}")
        param.data.copy_(loaded.narrow(0, self.tp.rank * count, count))
        return count

    def _normalised(self, norm: nn.Module, x: torch.Tensor, replicas: int) -> torch.Tensor:
        """`replicas`: how many consecutive ranks have the same heads."""
        if isinstance(norm, HeadsRMSNorm):
            return norm(x)
        if self.norm_per_head:
            return norm(x.reshape(x.shape[0], -1, self.head_size)).view(x.shape)
        return norm(x) if self.tp.size == 1 else self._normalised_over_ranks(norm, x, replicas)

    def _normalised_over_ranks(self, norm: nn.Module, x: torch.Tensor, replicas: int) -> torch.Tensor:
        """Normalise over the heads of all ranks; returns this rank's heads."""
        width = x.shape[-1]
        parts = self.tp.all_gather(x).unflatten(-1, (self.tp.size, width))
        whole = norm(parts[:, ::replicas].flatten(1))
        return whole.narrow(-1, self.tp.rank // replicas * width, width)


class QueryScaleTable(Patchable):
    """positions int64 [N] -> float32 [N, 1], see `QueryScale`."""

    factors: torch.Tensor

    def __init__(self, factors: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("factors", factors.unsqueeze(-1), persistent=False)
        self._ops = backend_of_construction().ops

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return self._ops.select_rows(self.factors, positions)


def _query_scale(scale: QueryScale, context: BuildContext) -> QueryScaleTable:
    return context.shared(scale, lambda: QueryScaleTable(scale.table(context.options.max_model_len)))


def check_rope(rope: RopeParameters, rotary_dim: int) -> None:
    if rotary_dim % 2:
        raise UnsupportedModelError(f"config.json: {rotary_dim} rotated channels per head is odd, must be even.")
    divisors = {len(rope.short_factor), len(rope.long_factor)}
    if rope.rope_type == "longrope" and divisors != {rotary_dim // 2}:
        raise UnsupportedModelError(
            f"config.json: short_factor and long_factor need {rotary_dim // 2} numbers, have {sorted(divisors)}."
        )


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """The slopes of ALiBi (arXiv:2108.12409), a bias that falls with the distance in the place of positions.

    One per head: powers of two whose exponents are spread evenly from 0 to -8.
    A number of heads between two powers of two takes every second slope of the larger power, then those between.
    """
    count = 2 ** math.ceil(math.log2(heads))
    slopes = [2.0 ** (-8.0 * index / count) for index in range(1, count + 1)]
    return tuple(slopes if count == heads else (slopes[1::2] + slopes[::2])[:heads])
