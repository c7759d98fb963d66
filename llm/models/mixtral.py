"""Mixtral: Mistral with experts in the place of the feed-forward."""

from __future__ import annotations

from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    DecoderForCausalLM,
    LayerConfig,
    MoEConfig,
    PreNorms,
    longest_sequence,
    read_heads,
    read_rms_norm,
)
from llm.models.reading_experts import W1_W2_W3, ignore_training


class MixtralForCausalLM(DecoderForCausalLM):
    renames = W1_W2_W3

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        ignore_training(reader)
        rope, norm = reader.rope(1e6), read_rms_norm(reader, 1e-5)
        layer = LayerConfig(
            attention=AttentionConfig(
                read_heads(reader, default_kv_heads=8), rope, reader.optional_integer("sliding_window")
            ),
            mlp=MoEConfig(
                reader.positive("num_local_experts", 8),
                reader.positive("num_experts_per_tok", 2),
                reader.positive("intermediate_size"),
                reader.string("hidden_act", "silu"),
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
