"""Granite 3: Llama with constants on the embedding, the attention scores, each block's output and the logits."""

from __future__ import annotations

from llm.models.blocks import DecoderConfig, DecoderForCausalLM, LayerConfig, decoder_sizes, longest_sequence
from llm.models.config_reader import ConfigReader


class GraniteForCausalLM(DecoderForCausalLM):
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
            attention_scale=reader.number("attention_multiplier", 1.0),
            embedding_multiplier=reader.number("embedding_multiplier", 1.0),
            residual_multiplier=reader.number("residual_multiplier", 1.0),
            logits_divisor=reader.number("logits_scaling", 1.0),
            tie_word_embeddings=reader.boolean("tie_word_embeddings", False),
        )
        reader.finish()
        return config
