"""Persimmon: LayerNorm (on each head too), partial rotary embedding, relu squared, a fused QKV tensor."""

from __future__ import annotations

from typing import ClassVar

from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    DecoderForCausalLM,
    LayerConfig,
    PlainMLPConfig,
    PreNorms,
    longest_sequence,
    read_decoder,
    read_heads,
    read_layer_norm,
)

_LAYER = (
    ("self_attn.query_key_value", "self_attn.qkv_proj"),
    ("self_attn.dense", "self_attn.o_proj"),
    ("self_attn.q_layernorm", "self_attn.q_norm"),
    ("self_attn.k_layernorm", "self_attn.k_norm"),
    ("mlp.dense_h_to_4h", "mlp.up_proj"),
    ("mlp.dense_4h_to_h", "mlp.down_proj"),
)


class PersimmonForCausalLM(DecoderForCausalLM):
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {}
    renames: ClassVar[tuple[tuple[str, str], ...]] = (
        *((f"model.layers.*.{theirs}", f"model.layers.*.{ours}") for theirs, ours in _LAYER),
        ("model.final_layernorm", "model.norm"),
    )

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        rope, norm = reader.rope(default_share=0.5), read_layer_norm(reader)
        attention = AttentionConfig(
            read_heads(reader),
            rope,
            qkv_bias=True,
            out_bias=True,
            qkv_by_key_head=True,
            qk_norm=norm if reader.boolean("qk_layernorm", True) else None,
        )
        activation = reader.string("hidden_act", "relu2")
        mlp = PlainMLPConfig(reader.positive("intermediate_size"), activation, bias=True)
        layer = LayerConfig(attention=attention, mlp=mlp, norms=PreNorms(norm))
        return read_decoder(reader, layer, norm, positions=longest_sequence(reader, rope, 16384))
