"""Qwen 3: queries and keys are normalised per head, and there are no biases unless config.json asks."""

from __future__ import annotations

from llm.models.blocks import DecoderConfig, DecoderForCausalLM, decoder_sizes, longest_sequence
from llm.models.config_reader import ConfigReader
from llm.models.qwen2 import qwen_layers


class Qwen3ForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        rope = reader.rope()
        bias = reader.boolean("attention_bias", False)
        sizes = decoder_sizes(reader, default_kv_heads=32)
        config = DecoderConfig(
            **(sizes | {"head_size": reader.positive("head_dim", 128)}),
            max_position_embeddings=longest_sequence(reader, rope, 32768),
            layers=qwen_layers(reader, rope),
            activation=reader.string("hidden_act", "silu"),
            qkv_bias=bias,
            out_bias=bias,
            qk_norm="head",
            tie_word_embeddings=reader.boolean("tie_word_embeddings", False),
        )
        reader.finish()
        return config
