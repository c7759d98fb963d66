"""Mistral 7B and its successors: Llama, some with a sliding window on every layer."""

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


class MistralForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        rope, norm = reader.rope(), read_rms_norm(reader)
        window = reader.optional_integer("sliding_window", 4096)
        layer = LayerConfig(
            attention=AttentionConfig(read_heads(reader, default_kv_heads=8), rope, window),
            mlp=GatedMLPConfig(reader.positive("intermediate_size"), reader.string("hidden_act", "silu")),
            norms=PreNorms(norm),
        )
        config = DecoderConfig(
            vocab_size=reader.positive("vocab_size"),
            hidden_size=reader.positive("hidden_size"),
            max_position_embeddings=longest_sequence(reader, rope, 131072),
            layers=(layer,) * reader.positive("num_hidden_layers"),
            final_norm=norm,
            tie_word_embeddings=reader.boolean("tie_word_embeddings", False),
        )
        reader.finish()
        return config
