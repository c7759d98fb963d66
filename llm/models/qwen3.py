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

        config = DecoderConfig(
            vocab_size=reader.positive("vocab_size"),
            hidden_size=reader.positive("hidden_size"),
            max_position_embeddings=longest_sequence(reader, rope, 32768),
            layers=tuple(map(layer, qwen_windows(reader))),
            final_norm=norm,
            tie_word_embeddings=reader.boolean("tie_word_embeddings", False),
        )
        reader.finish()
        return config
