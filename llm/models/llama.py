"""Llama 1 to 3 and the many models that share its config.json."""

from __future__ import annotations

from llm.models.blocks import DecoderConfig, DecoderForCausalLM, LayerConfig, decoder_sizes, longest_sequence
from llm.models.config_reader import ConfigReader


class LlamaForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        rope = reader.rope()
        bias = reader.boolean("attention_bias", False)
        config = DecoderConfig(
            **decoder_sizes(reader),
            max_position_embeddings=longest_sequence(reader, rope),
            layers=(LayerConfig(rope=rope),) * reader.positive("num_hidden_layers"),
            activation=reader.string("hidden_act", "silu"),
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=reader.boolean("mlp_bias", False),
            tie_word_embeddings=reader.boolean("tie_word_embeddings", False),
        )
        reader.finish()
        return config
