"""Arcee's AFM: Llama with an MLP without a gate, and relu squared."""

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
    read_rms_norm,
)


class ArceeForCausalLM(DecoderForCausalLM):
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        rope, norm, bias = reader.rope(), read_rms_norm(reader, 1e-5), reader.boolean("attention_bias", False)
        activation, mlp_bias = reader.string("hidden_act", "relu2"), reader.boolean("mlp_bias", False)
        layer = LayerConfig(
            attention=AttentionConfig(read_heads(reader), rope, qkv_bias=bias, out_bias=bias),
            mlp=PlainMLPConfig(reader.positive("intermediate_size"), activation, mlp_bias),
            norms=PreNorms(norm),
        )
        return read_decoder(reader, layer, norm, positions=longest_sequence(reader, rope, 4096))
