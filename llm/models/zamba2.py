"""Zamba2: Mamba 2, and before some of its layers one of a few blocks of attention that these layers share.

A block of attention and an MLP has adapters of its own for each layer that uses it (arXiv:2411.15242). It reads the
stream beside the embeddings, and what it computes is added to what the layer's recurrence reads. A layer that uses it
has a KV cache of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from llm.base.watch import Patchable
from llm.errors import UnsupportedModelError
from llm.forward import ForwardBatch, KVCacheSpec
from llm.layers.activation import GATED_ACTIVATIONS
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
from llm.models import decoder as d
from llm.models.mamba import TRAINING


@dataclass(frozen=True)
class SharedBlockConfig(d.PartConfig):
    """One use of a block; the uses of a block share its weights, and differ in their adapters and their state.

    Attributes:
        mlp: without constants.
        block, use: which block, and which of all uses of all blocks.
        rank: of the adapters of the MLP's first matrix and, with `adapts_attention`, of queries, keys and values.
    """

    heads: d.Heads
    mlp: d.GatedMLPConfig
    norm: d.NormConfig
    block: int
    use: int
    rank: int
    adapts_attention: bool = False
    rope: d.RopeParameters | None = None

    def __post_init__(self) -> None:
        if self.adapts_attention and self.heads.query != self.heads.key_value:
            raise UnsupportedModelError(
                f"config.json: num_key_value_heads is {self.heads.key_value}; a block whose keys have adapters, which "
                f"are as wide as its queries, has as many as num_attention_heads, {self.heads.query}."
            )
        if self.rope is not None:
            d.check_rope(self.rope, self.heads.size)

    def build(self, context: d.BuildContext, prefix: str) -> nn.Module:
        block = context.shared(("shared block", self.block), lambda: SharedBlock(self, context, prefix))
        block.add_use(self, context)
        return block if block.prefix == prefix else LaterUse(block)

    def states(self, dtype: torch.dtype, tp: TensorParallel) -> tuple[KVCacheSpec, ...]:
        return (KVCacheSpec(self.heads.key_value_on_rank(tp), self.heads.size, dtype),)


def _adapter(into: LinearBase, rank: int, context: d.BuildContext, prefix: str, outputs: list[int]) -> nn.Sequential:
    """Two matrices, whose product is added to a part of the matrix of `into` that has these outputs."""
    first = ReplicatedLinear(into.input_size, rank, bias=False, prefix=f"{prefix}.0", **context.linear)
    path = f"{prefix}.1"
    if len(outputs) == 1:
        return nn.Sequential(first, ColumnParallelLinear(rank, outputs[0], bias=False, prefix=path, **context.linear))
    return nn.Sequential(first, MergedColumnParallelLinear(rank, outputs, bias=False, prefix=path, **context.linear))


class SharedAttention(Patchable):
    """Attention over hidden states beside embeddings: float [N, 2 * hidden_size] -> float [N, hidden_size]."""

    _lists = ("linear_q_adapter_list", "linear_k_adapter_list", "linear_v_adapter_list")

    def __init__(self, config: SharedBlockConfig, context: d.BuildContext, prefix: str) -> None:
        super().__init__()
        heads, linear = config.heads, context.linear
        inputs, self.size = 2 * context.hidden_size, heads.size
        self.qkv_proj = QKVParallelLinear(
            inputs,
            heads.size,
            heads.query,
            heads.key_value,
            bias=False,
            prefix=f"{prefix}.qkv_proj",
            **linear,
        )
        self.sizes = [self.qkv_proj.num_heads * heads.size, *[self.qkv_proj.num_kv_heads * heads.size] * 2]
        outputs = heads.query * heads.size
        self.o_proj = RowParallelLinear(outputs, context.hidden_size, bias=False, prefix=f"{prefix}.o_proj", **linear)
        for name in self._lists:
            self.add_module(name, nn.ModuleDict())
        self.rotary_emb = None if config.rope is None else context.rotary(heads.size, config.rope)

    def add_use(self, config: SharedBlockConfig, context: d.BuildContext, prefix: str) -> None:
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

    def __init__(self, config: SharedBlockConfig, context: d.BuildContext, prefix: str) -> None:
        super().__init__()
        hidden, inner, bias = context.hidden_size, config.mlp.intermediate_size, config.mlp.bias
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, [inner, inner], bias=bias, prefix=f"{prefix}.gate_up_proj", **context.linear
        )
        self.down_proj = RowParallelLinear(inner, hidden, bias=bias, prefix=f"{prefix}.down_proj", **context.linear)
        self.gate_up_proj_adapter_list = nn.ModuleDict()
        self.act_fn = GATED_ACTIVATIONS[config.mlp.activation]()

    def add_use(self, config: SharedBlockConfig, context: d.BuildContext, prefix: str) -> None:
        path, inner = f"{prefix}.gate_up_proj_adapter_list.{config.use}", config.mlp.intermediate_size
        adapter = _adapter(self.gate_up_proj, config.rank, context, path, [inner, inner])
        self.gate_up_proj_adapter_list[str(config.use)] = adapter

    def forward(self, x: torch.Tensor, use: int) -> torch.Tensor:
        both = self.gate_up_proj(x) + self.gate_up_proj_adapter_list[str(use)](x)
        return self.down_proj(self.act_fn(both))


class SharedBlock(Patchable):
    """mlp(norm(attention(norm(x beside the embeddings)))), without sums between: float [N, H] -> float [N, H]."""

    def __init__(self, config: SharedBlockConfig, context: d.BuildContext, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        self.self_attn = SharedAttention(config, context, f"{prefix}.self_attn")
        self.feed_forward = SharedMLP(config, context, f"{prefix}.feed_forward")
        self.input_layernorm = config.norm.build(2 * context.hidden_size, context)
        self.pre_ff_layernorm = config.norm.build(context.hidden_size, context)

    def add_use(self, config: SharedBlockConfig, context: d.BuildContext) -> None:
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
class SharedBlockLayer(d.LayerConfig):
    """A layer that uses a shared block before its mixer."""

    shared: SharedBlockConfig

    @property
    def parts(self) -> Mapping[str, d.PartConfig]:
        return {"shared_transformer": self.shared, **super().parts}


class SharedBeforeLayer(d.DecoderLayer):
    shared_transformer: SharedBlock | LaterUse

    def __init__(self, layer: d.LayerConfig, norms: "SharedBefore", context: d.BuildContext, prefix: str) -> None:
        super().__init__(layer, context, prefix)
        if not isinstance(layer, SharedBlockLayer):
            raise TypeError("a layer with a shared block is a SharedBlockLayer")
        self.use = layer.shared.use
        hidden = context.hidden_size
        self.linear = ReplicatedLinear(hidden, hidden, bias=False, prefix=f"{prefix}.linear", **context.linear)
        self.input_layernorm = norms.norm.build(hidden, context)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch) -> d.Stream:
        stream = hidden if residual is None else hidden + residual
        added = self.linear(self.shared_transformer(stream, batch, self.use))
        normed, _ = self.input_layernorm(added, stream)
        return getattr(self, self.mixer_name)(normed, batch), stream


@dataclass(frozen=True)
class SharedBefore(d.Norms):
    """x + mixer(norm(x + linear(block(x))))."""

    layer = SharedBeforeLayer
    norm: d.NormConfig


class SharedBlocksForCausalLM(d.DecoderForCausalLM):
    """A decoder whose layers find the embeddings in `ForwardBatch.inputs_embeds`."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        return super().forward(replace(batch, inputs_embeds=self.embed_batch(batch)))


# Of transformers' own forward, and what it derives and writes.
_UNUSED = """
    use_mamba_kernels num_logits_to_keep chunk_size use_mem_eff_path hybrid_layer_ids use_conv_bias
    attention_hidden_size attention_head_dim mamba_headdim kv_channels num_query_groups ffn_hidden_size
""".split()
_KINDS = {"mamba": False, "linear_attention": False, "hybrid": True}
_MIXER_EPS = 1e-5  # whatever rms_norm_eps says


class Zamba2ForCausalLM(SharedBlocksForCausalLM):
    renames = (("model.layers.*.mamba_decoder", "model.layers.*"), ("model.final_layernorm", "model.norm"))

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> d.DecoderConfig:
        reader.ignore(*TRAINING, *_UNUSED)
        reader.expect("use_long_context", False)
        norm, mamba, shared = d.read_rms_norm(reader, 1e-5), _read_mamba(reader), _read_blocks(reader)
        uses = iter(shared)
        layers = [
            SharedBlockLayer(attention=mamba, shared=next(uses), norms=SharedBefore(norm))
            if is_hybrid
            else d.LayerConfig(attention=mamba, norms=d.OnePart(norm))
            for is_hybrid in _hybrid_layers(reader)
        ]
        positions = d.longest_sequence(reader, reader.rope(), 4096)
        return d.read_decoder(reader, layers, norm, positions=positions, tied=True)


def _hybrid_layers(reader: d.ConfigReader) -> list[bool]:
    """Which layers use a block; the default is Zamba2-2.7B's."""
    count = reader.positive("num_hidden_layers", 54)
    default = [*range(6, 43, 6), 47, 51]
    kinds = reader.names("layers_block_type") or ["hybrid" if i in default else "mamba" for i in range(count)]
    if len(kinds) != count or not _KINDS.keys() >= set(kinds):
        raise reader.error("layers_block_type", kinds, f"{count} of {', '.join(map(repr, _KINDS))}")
    return [_KINDS[kind] for kind in kinds]


def _read_mamba(reader: d.ConfigReader) -> d.Mamba2Config:
    width = reader.positive("mamba_expand", 2) * reader.positive("hidden_size")
    heads = reader.positive("n_mamba_heads", 8)
    if width % heads:
        raise reader.error("n_mamba_heads", heads, f"a divisor of {width} channels")
    groups, states = reader.positive("mamba_ngroups", 1), reader.positive("mamba_d_state", 64)
    kernel, bias = reader.positive("mamba_d_conv", 4), reader.boolean("add_bias_linear", False)
    limits = d.read_step_limits(reader)
    return d.Mamba2Config(heads, width // heads, groups, states, kernel, True, bias, _MIXER_EPS, dt_limit=limits)


def _read_blocks(reader: d.ConfigReader) -> list[SharedBlockConfig]:
    """One for each use, of blocks that take turns."""
    hidden, heads = reader.positive("hidden_size"), reader.positive("num_attention_heads", 32)
    if 2 * hidden % heads:
        raise reader.error("num_attention_heads", heads, f"a divisor of {2 * hidden} channels")
    sizes = d.Heads(heads, reader.positive("num_key_value_heads", heads), 2 * hidden // heads)
    inner, activation = reader.positive("intermediate_size", 4 * hidden), reader.string("hidden_act", "gelu")
    mlp = d.GatedMLPConfig(inner, activation, reader.boolean("add_bias_linear", False))
    norm = d.NormConfig(reader.positive_number("rms_norm_eps", 1e-5))
    blocks, rank = reader.positive("num_mem_blocks", 1), reader.positive("adapter_rank", 128)
    adapts = reader.boolean("use_shared_attention_adapter", False)
    rope = reader.rope() if reader.boolean("use_mem_rope", False) else None
    return [
        SharedBlockConfig(sizes, mlp, norm, use % blocks, use, rank, adapts, rope)
        for use in range(sum(_hybrid_layers(reader)))
    ]
