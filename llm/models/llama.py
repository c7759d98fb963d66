"""Llama 1 to 3 and the many models that share its config.json."""

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


class LlamaForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        rope, norm = reader.rope(), read_rms_norm(reader)
        bias = reader.boolean("attention_bias", False)
        layer = LayerConfig(
            attention=AttentionConfig(read_heads(reader), rope, qkv_bias=bias, out_bias=bias),
            mlp=GatedMLPConfig(
                reader.positive("intermediate_size"),
                reader.string("hidden_act", "silu"),
                bias=reader.boolean("mlp_bias", False),
            ),
            norms=PreNorms(norm),
        )
        config = DecoderConfig(
            vocab_size=reader.positive("vocab_size"),
            hidden_size=reader.positive("hidden_size"),
            max_position_embeddings=longest_sequence(reader, rope),
            layers=(layer,) * reader.positive("num_hidden_layers"),
            final_norm=norm,
            tie_word_embeddings=reader.boolean("tie_word_embeddings", False),
        )
        reader.finish()
        return config
