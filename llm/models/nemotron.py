"""Nemotron 3 and 4, Minitron: LayerNorm with weight + 1, partial rotary embedding, an ungated relu squared MLP."""

from __future__ import annotations

from typing import ClassVar

from llm.layers.norm import LayerNorm1P
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


class NemotronForCausalLM(DecoderForCausalLM):
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        rope, norm = reader.rope(default_share=0.5), read_layer_norm(reader, "norm_eps", LayerNorm1P)
        bias, mlp_bias = reader.boolean("attention_bias", False), reader.boolean("mlp_bias", False)
        activation = reader.string("hidden_act", "relu2")
        layer = LayerConfig(
            attention=AttentionConfig(read_heads(reader), rope, qkv_bias=bias, out_bias=bias),
            mlp=PlainMLPConfig(reader.positive("intermediate_size"), activation, mlp_bias),
            norms=PreNorms(norm),
        )
        return read_decoder(reader, layer, norm, positions=longest_sequence(reader, rope, 4096))
