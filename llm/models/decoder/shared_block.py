"""A block of attention and an MLP that several layers share, each with adapters of its own (Zamba2, arXiv:2411.15242).

The block reads the stream beside the embeddings, and what it computes is added to what the layer's recurrence reads. A
layer that uses it has a KV cache of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from llm.base.watch import Patchable
from llm.errors import UnsupportedModelError
from llm.forward import ForwardBatch, KVCacheSpec
from llm.layers.attention import Attention
from llm.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from llm.layers.parallel import TensorParallel
from llm.layers.rotary import RopeParameters
from llm.models.decoder.attention import Heads, check_rope
from llm.models.decoder.layer import DecoderLayer, LayerConfig, Norms, Stream
from llm.models.decoder.mlp import GATED_ACTIVATIONS, GatedMLPConfig
from llm.models.decoder.model import DecoderForCausalLM
from llm.models.decoder.part import BuildContext, NormConfig, PartConfig


@dataclass(frozen=True)
class SharedBlockConfig(PartConfig):
    """One use of a block; the uses of a block share its weights, and differ in their adapters and their state.

    Attributes:
        mlp: without constants.
        block, use: which block, and which of all uses of all blocks.
        rank: of the adapters of the MLP's first matrix and, with `adapts_attention`, of queries, keys and values.
    """

    heads: Heads
    mlp: GatedMLPConfig
    norm: NormConfig
    block: int
    use: int
    rank: int
    adapts_attention: bool = False
    rope: RopeParameters | None = None

    def __post_init__(self) -> None:
        if self.adapts_attention and self.heads.query != self.heads.key_value:
            raise UnsupportedModelError(
                f"config.json: num_key_value_heads is {self.heads.key_value}; a block whose keys have adapters, which "
                f"are as wide as its queries, has as many as num_attention_heads, {self.heads.query}."
            )
        if self.rope is not None:
            check_rope(self.rope, self.heads.size)

    def build(self, context: BuildContext, prefix: str) -> nn.Module:
        block = context.shared(("shared block", self.block), lambda: SharedBlock(self, context, prefix))
        block.add_use(self, context)
        return block if block.prefix == prefix else LaterUse(block)

    def states(self, dtype: torch.dtype, tp: TensorParallel) -> tuple[KVCacheSpec, ...]:
        return (KVCacheSpec(self.heads.key_value_on_rank(tp), self.heads.size, dtype),)


def _adapter(into: LinearBase, rank: int, context: BuildContext, prefix: str, outputs: list[int]) -> nn.Sequential:
    """Two matrices, whose product is added to a part of the matrix of `into` that has these outputs."""
    first = ReplicatedLinear(
        into.input_size, rank, bias=False, prefix=f"{prefix}.0", return_bias=False, **context.common
    )
    path = f"{prefix}.1"
    if len(outputs) == 1:
        return nn.Sequential(
            first, ColumnParallelLinear(rank, outputs[0], bias=False, prefix=path, return_bias=False, **context.common)
        )
    return nn.Sequential(
        first, MergedColumnParallelLinear(rank, outputs, bias=False, prefix=path, return_bias=False, **context.common)
    )


class SharedAttention(Patchable):
    """Attention over hidden states beside embeddings: float [N, 2 * hidden_size] -> float [N, hidden_size]."""

    _lists = ("linear_q_adapter_list", "linear_k_adapter_list", "linear_v_adapter_list")

    def __init__(self, config: SharedBlockConfig, context: BuildContext, prefix: str) -> None:
        super().__init__()
        heads, common = config.heads, context.common
        inputs, self.size = 2 * context.hidden_size, heads.size
        self.qkv_proj = QKVParallelLinear(
            inputs,
            heads.size,
            heads.query,
            heads.key_value,
            bias=False,
            prefix=f"{prefix}.qkv_proj",
            return_bias=False,
            **common,
        )
        self.sizes = [self.qkv_proj.num_heads * heads.size, *[self.qkv_proj.num_kv_heads * heads.size] * 2]
        outputs = heads.query * heads.size
        self.o_proj = RowParallelLinear(
            outputs, context.hidden_size, bias=False, prefix=f"{prefix}.o_proj", return_bias=False, **common
        )
        for name in self._lists:
            self.add_module(name, nn.ModuleDict())
        self.rotary_emb = None if config.rope is None else context.rotary(heads.size, config.rope)

    def add_use(self, config: SharedBlockConfig, context: BuildContext, prefix: str) -> None:
        heads, kv_heads, use = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads, str(config.use)
        # Half of the channels are of the embeddings.
        scale, index = (self.size / 2) ** -0.5, context.next_state()
        attention = Attention(heads, kv_heads, self.size, layer_index=index, scale=scale)
        self.add_module(f"attn_{use}", attention)
        for name in self._lists if config.adapts_attention else ():
            path, outputs = f"{prefix}.{name}.{use}", [config.heads.query * self.size]
            self.get_submodule(name).add_module(use, _adapter(self.qkv_proj, config.rank, context, path, outputs))

    def forward(self, x: torch.Tensor, batch: ForwardBatch, use: int) -> torch.Tensor:
        qkv = self.qkv_proj(x)
        adapters = [getattr(self, name) for name in self._lists]
        if all(adapters):
            qkv = qkv + torch.cat([adapter[str(use)](x) for adapter in adapters], dim=1)
        query, key, value = qkv.split_with_sizes(self.sizes, dim=-1)
        if self.rotary_emb is not None:
            query, key = self.rotary_emb(batch.positions, query, key)
        return self.o_proj(self.get_submodule(f"attn_{use}")(query, key, value, batch))


class SharedMLP(Patchable):
    """down(act(gate(x)) * up(x)), with an adapter of gate and up for each use."""

    def __init__(self, config: SharedBlockConfig, context: BuildContext, prefix: str) -> None:
        super().__init__()
        hidden, inner, bias = context.hidden_size, config.mlp.intermediate_size, config.mlp.bias
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, [inner, inner], bias=bias, prefix=f"{prefix}.gate_up_proj", return_bias=False, **context.common
        )
        self.down_proj = RowParallelLinear(
            inner, hidden, bias=bias, prefix=f"{prefix}.down_proj", return_bias=False, **context.common
        )
        self.gate_up_proj_adapter_list = nn.ModuleDict()
        self.act_fn = GATED_ACTIVATIONS[config.mlp.activation]()

    def add_use(self, config: SharedBlockConfig, context: BuildContext, prefix: str) -> None:
        path, inner = f"{prefix}.gate_up_proj_adapter_list.{config.use}", config.mlp.intermediate_size
        adapter = _adapter(self.gate_up_proj, config.rank, context, path, [inner, inner])
        self.gate_up_proj_adapter_list[str(config.use)] = adapter

    def forward(self, x: torch.Tensor, use: int) -> torch.Tensor:
        both = self.gate_up_proj(x) + self.gate_up_proj_adapter_list[str(use)](x)
        return self.down_proj(self.act_fn(both))


class SharedBlock(Patchable):
    """mlp(norm(attention(norm(x beside the embeddings)))), without sums between: float [N, H] -> float [N, H]."""

    def __init__(self, config: SharedBlockConfig, context: BuildContext, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        self.self_attn = SharedAttention(config, context, f"{prefix}.self_attn")
        self.feed_forward = SharedMLP(config, context, f"{prefix}.feed_forward")
        self.input_layernorm = config.norm.build(2 * context.hidden_size, context)
        self.pre_ff_layernorm = config.norm.build(context.hidden_size, context)

    def add_use(self, config: SharedBlockConfig, context: BuildContext) -> None:
        """Its adapters have names in the layer of the first use, as all weights of the block."""
        self.self_attn.add_use(config, context, f"{self.prefix}.self_attn")
        self.feed_forward.add_use(config, context, f"{self.prefix}.feed_forward")

    def forward(self, stream: torch.Tensor, batch: ForwardBatch, use: int) -> torch.Tensor:
        if batch.inputs_embeds is None:
            raise RuntimeError("a shared block reads the embeddings, which its model puts into the batch")
        x = self.input_layernorm(torch.cat([stream, batch.inputs_embeds], dim=1))
        return self.feed_forward(self.pre_ff_layernorm(self.self_attn(x, batch, use)), use)


class LaterUse(Patchable):
    """A block that an earlier layer has among its children: a weight has one name."""

    def __init__(self, block: SharedBlock) -> None:
        super().__init__()
        self._block = [block]

    def forward(self, stream: torch.Tensor, batch: ForwardBatch, use: int) -> torch.Tensor:
        return self._block[0](stream, batch, use)


@dataclass(frozen=True, kw_only=True)
class SharedBlockLayer(LayerConfig):
    """A layer that uses a shared block before its mixer."""

    shared: SharedBlockConfig

    @property
    def parts(self) -> Mapping[str, PartConfig]:
        return {"shared_transformer": self.shared, **super().parts}


@dataclass(frozen=True)
class SharedBefore(Norms):
    """x + mixer(norm(x + linear(block(x))))."""

    norm: NormConfig

    def build(self, layer: LayerConfig, context: BuildContext, prefix: str) -> DecoderLayer:
        return SharedBeforeLayer(layer, self.norm, context, prefix)


class SharedBeforeLayer(DecoderLayer):
    shared_transformer: SharedBlock | LaterUse

    def __init__(self, layer: LayerConfig, norm: NormConfig, context: BuildContext, prefix: str) -> None:
        super().__init__(layer, context, prefix)
        if not isinstance(layer, SharedBlockLayer):
            raise TypeError("a layer with a shared block is a SharedBlockLayer")
        self.use = layer.shared.use
        hidden = context.hidden_size
        self.linear = ReplicatedLinear(
            hidden, hidden, bias=False, prefix=f"{prefix}.linear", return_bias=False, **context.common
        )
        self.input_layernorm = norm.build(hidden, context)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch) -> Stream:
        stream = hidden if residual is None else hidden + residual
        added = self.linear(self.shared_transformer(stream, batch, self.use))
        normed, _ = self.input_layernorm(added, stream)
        return getattr(self, self.mixer_name)(normed, batch), stream


class SharedBlocksForCausalLM(DecoderForCausalLM):
    """A decoder whose layers find the embeddings in `ForwardBatch.inputs_embeds`."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        return super().forward(replace(batch, inputs_embeds=self.embed_batch(batch)))
