"""The parametrised decoder that families share.

Owns `DecoderConfig` and the wiring of attention, feed-forward, layer and model. A family file maps its config.json onto
these parameters; a difference of three lines is a parameter here, not a copy there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from llm.errors import UnsupportedModelError
from llm.forward import ForwardBatch, KVCacheSpec
from llm.layers.activation import SiluAndMul
from llm.layers.attention import Attention
from llm.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from llm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from llm.layers.logits import LogitsProcessor
from llm.layers.norm import RMSNorm
from llm.layers.rotary import RopeParameters, RotaryEmbedding
from llm.models.config_reader import ConfigReader
from llm.models.interface import BuildOptions


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only transformer with pre-norm residual blocks, grouped-query attention and a gated feed-forward.

    `head_size` is independent of `hidden_size / num_heads`. `qkv_bias`, `out_bias` and `mlp_bias` say which linear
    layers have one.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_position_embeddings: int
    norm_eps: float
    rope: RopeParameters
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"config.json: num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads "
                f"{self.num_kv_heads}."
            )
        if self.head_size % 2:
            raise UnsupportedModelError(f"config.json: head_dim {self.head_size} is odd; rotary embeddings need pairs.")


class DecoderAttention(nn.Module):
    def __init__(self, config: DecoderConfig, options: BuildOptions, rotary: RotaryEmbedding, index: int, prefix: str):
        super().__init__()
        common = {"params_dtype": options.params_dtype, "quant_config": options.quant_config}
        self.sizes = [config.num_heads * config.head_size, *[config.num_kv_heads * config.head_size] * 2]
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_size,
            config.num_heads,
            config.num_kv_heads,
            bias=config.qkv_bias,
            prefix=f"{prefix}.qkv_proj",
            **common,
        )
        self.o_proj = RowParallelLinear(
            self.sizes[0], config.hidden_size, bias=config.out_bias, prefix=f"{prefix}.o_proj", **common
        )
        self.rotary_emb = rotary
        self.attn = Attention(
            config.num_heads,
            config.num_kv_heads,
            config.head_size,
            layer_index=index,
            scale=config.head_size**-0.5,
        )

    def forward(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        query, key, value = self.qkv_proj(hidden).split(self.sizes, dim=-1)
        query, key = self.rotary_emb(batch.positions, query, key)
        return self.o_proj(self.attn(query, key, value, batch))


class GatedMLP(nn.Module):
    def __init__(self, config: DecoderConfig, options: BuildOptions, prefix: str):
        super().__init__()
        common = {
            "bias": config.mlp_bias,
            "params_dtype": options.params_dtype,
            "quant_config": options.quant_config,
        }
        sizes = [config.intermediate_size] * 2
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size, sizes, prefix=f"{prefix}.gate_up_proj", **common
        )
        self.down_proj = RowParallelLinear(
            config.intermediate_size, config.hidden_size, prefix=f"{prefix}.down_proj", **common
        )
        self.act_fn = SiluAndMul()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(hidden)))


class DecoderLayer(nn.Module):
    def __init__(self, config: DecoderConfig, options: BuildOptions, rotary: RotaryEmbedding, index: int, prefix: str):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps, options.params_dtype)
        self.self_attn = DecoderAttention(config, options, rotary, index, f"{prefix}.self_attn")
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps, options.params_dtype)
        self.mlp = GatedMLP(config, options, f"{prefix}.mlp")

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes and returns (what the last block added, the residual stream before it)."""
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(hidden, batch)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class DecoderModel(nn.Module):
    def __init__(self, config: DecoderConfig, options: BuildOptions, prefix: str = "model"):
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            params_dtype=options.params_dtype,
            quant_config=options.quant_config,
            prefix=f"{prefix}.embed_tokens",
        )
        rotary = RotaryEmbedding(config.head_size, config.head_size, options.max_model_len, config.rope)
        self.layers = nn.ModuleList(
            DecoderLayer(config, options, rotary, index, f"{prefix}.layers.{index}")
            for index in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, options.params_dtype)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        hidden = self.embed_tokens(batch.input_ids) if batch.inputs_embeds is None else batch.inputs_embeds
        residual = torch.zeros_like(hidden)
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, batch)
        return self.norm(hidden, residual)[0]


class DecoderForCausalLM(nn.Module):
    """Implements `llm.models.interface.CausalLM`; a family overrides `read_config` and, when needed, the data below."""

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    renames: ClassVar[tuple[tuple[str, str], ...]] = ()
    # Older checkpoints store the rotary frequencies; they are recomputed from config.json.
    ignored_weights: ClassVar[tuple[str, ...]] = ("inv_freq",)

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        raise NotImplementedError

    @classmethod
    def kv_cache_specs(cls, config: DecoderConfig, dtype: torch.dtype) -> list[KVCacheSpec]:
        return [KVCacheSpec(config.num_kv_heads, config.head_size, dtype)] * config.num_layers

    def __init__(self, config: DecoderConfig, options: BuildOptions) -> None:
        super().__init__()
        self.model = DecoderModel(config, options)
        self.lm_head = self.model.embed_tokens
        if not config.tie_word_embeddings:
            self.lm_head = ParallelLMHead(
                config.vocab_size,
                config.hidden_size,
                params_dtype=options.params_dtype,
                quant_config=options.quant_config,
                prefix="lm_head",
            )
        self.logits_processor = LogitsProcessor()

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        return self.model(batch)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits_processor(self.lm_head, hidden)
