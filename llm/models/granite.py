"""Granite 3: Llama with constants on the embedding, the attention scores, each part's output and the logits."""

from __future__ import annotations

from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    DecoderForCausalLM,
    GatedMLPConfig,
    LayerConfig,
    PartConfig,
    ScaledPreNorms,
    longest_sequence,
    read_decoder,
    read_heads,
    read_rms_norm,
)


class GraniteForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        mlp = GatedMLPConfig(
            reader.positive("intermediate_size"),
            reader.string("hidden_act", "silu"),
            bias=reader.boolean("mlp_bias", False),
        )
        return granite_decoder(reader, mlp)


def granite_decoder(reader: ConfigReader, mlp: PartConfig) -> DecoderConfig:
    """Granite's decoder around any feed-forward part."""
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
        mlp=mlp,
        norms=ScaledPreNorms(norm, reader.number("residual_multiplier", 1.0)),
    )
    return read_decoder(
        reader,
        layer,
        norm,
        positions=longest_sequence(reader, rope),
        embedding_multiplier=reader.number("embedding_multiplier", 1.0),
        logits_divisor=reader.positive_number("logits_scaling", 1.0),
    )
