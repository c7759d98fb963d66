"""Qwen 3: queries and keys are normalised per head, and there are no biases unless config.json says so."""

from __future__ import annotations

from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    DecoderForCausalLM,
    GatedMLPConfig,
    LayerConfig,
    PreNorms,
    longest_sequence,
    read_decoder,
    read_heads,
    read_rms_norm,
)
from llm.models.qwen2 import qwen_windows


class Qwen3ForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        rope, norm = reader.rope(), read_rms_norm(reader)
        heads = read_heads(reader, default_kv_heads=32, default_size=128)
        bias = reader.boolean("attention_bias", False)
        mlp = GatedMLPConfig(reader.positive("intermediate_size"), reader.string("hidden_act", "silu"))

        def layer(window: int | None) -> LayerConfig:
            attention = AttentionConfig(heads, rope, window, qkv_bias=bias, out_bias=bias, qk_norm=norm)
            return LayerConfig(attention=attention, mlp=mlp, norms=PreNorms(norm))

        return read_decoder(
            reader, map(layer, qwen_windows(reader)), norm, positions=longest_sequence(reader, rope, 32768)
        )
