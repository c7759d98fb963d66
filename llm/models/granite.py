"""Granite 3: Llama with constants on the embedding, the attention scores, each part's output and the logits."""

from __future__ import annotations

from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    DecoderForCausalLM,
    GatedMLPConfig,
    LayerConfig,
    ScaledPreNorms,
    longest_sequence,
    read_heads,
    read_rms_norm,
)


class GraniteForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        rope, norm = reader.rope(), read_rms_norm(reader)
        bias = reader.boolean("attention_bias", False)
        layer = LayerConfig(
            attention=AttentionConfig(
                read_heads(reader),
                rope,
                qkv_bias=bias,
                out_bias=bias,
                scale=reader.number("attention_multiplier", 1.0),
            ),
            mlp=GatedMLPConfig(
                reader.positive("intermediate_size"),
                reader.string("hidden_act", "silu"),
                bias=reader.boolean("mlp_bias", False),
            ),
            norms=ScaledPreNorms(norm, reader.number("residual_multiplier", 1.0)),
        )
        config = DecoderConfig(
            vocab_size=reader.positive("vocab_size"),
            hidden_size=reader.positive("hidden_size"),
            max_position_embeddings=longest_sequence(reader, rope),
            layers=(layer,) * reader.positive("num_hidden_layers"),
            final_norm=norm,
            embedding_multiplier=reader.number("embedding_multiplier", 1.0),
            logits_divisor=reader.positive_number("logits_scaling", 1.0),
            tie_word_embeddings=reader.boolean("tie_word_embeddings", False),
        )
        reader.finish()
        return config
