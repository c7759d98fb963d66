"""Jais 2: Llama with layer norms and a plain feed-forward of squared ReLU."""

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


class Jais2ForCausalLM(DecoderForCausalLM):
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        rope, norm = reader.rope(), read_layer_norm(reader)
        bias, mlp_bias = reader.boolean("attention_bias", True), reader.boolean("mlp_bias", True)
        layer = LayerConfig(
            attention=AttentionConfig(read_heads(reader), rope, qkv_bias=bias, out_bias=bias),
            mlp=PlainMLPConfig(reader.positive("intermediate_size"), reader.string("hidden_act", "relu2"), mlp_bias),
            norms=PreNorms(norm),
        )
        return read_decoder(reader, layer, norm, positions=longest_sequence(reader, rope, 8192))
