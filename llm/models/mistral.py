"""Mistral 7B and its successors: Llama with, in some, a sliding window on every layer."""

from __future__ import annotations

from llm.models.blocks import DecoderConfig, DecoderForCausalLM, LayerConfig, decoder_sizes, longest_sequence
from llm.models.config_reader import ConfigReader


class MistralForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        rope = reader.rope()
        layer = LayerConfig(reader.optional_integer("sliding_window", 4096), rope)
        config = DecoderConfig(
            **decoder_sizes(reader, default_kv_heads=8),
            max_position_embeddings=longest_sequence(reader, rope, 131072),
            layers=(layer,) * reader.positive("num_hidden_layers"),
            activation=reader.string("hidden_act", "silu"),
            tie_word_embeddings=reader.boolean("tie_word_embeddings", False),
        )
        reader.finish()
        return config
