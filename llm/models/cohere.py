"""Command R: parallel residual, LayerNorm without bias, interleaved rotary embedding, scaled logits."""

from __future__ import annotations

from llm.layers.rotary import RopeParameters
from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    DecoderForCausalLM,
    GatedMLPConfig,
    LayerConfig,
    ParallelNorms,
    longest_sequence,
    read_decoder,
    read_heads,
    read_layer_norm,
)


class CohereForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        reader.expect("use_qk_norm", False)  # command-r-plus alone: a norm for each head
        rope = reader.rope(500_000.0)
        return cohere_decoder(reader, rope, [cohere_attention(reader, rope)] * reader.positive("num_hidden_layers"))


def cohere_attention(reader: ConfigReader, rope: RopeParameters) -> AttentionConfig:
    bias = reader.boolean("attention_bias", False)
    return AttentionConfig(read_heads(reader), rope, rope_interleaved=True, qkv_bias=bias, out_bias=bias)


def cohere_decoder(reader: ConfigReader, rope: RopeParameters, attention: list[AttentionConfig]) -> DecoderConfig:
    """All that is around the attention layers of Command R, R7B and A."""
    norm = read_layer_norm(reader, has_bias=False)
    mlp = GatedMLPConfig(reader.positive("intermediate_size"), reader.string("hidden_act", "silu"))
    return read_decoder(
        reader,
        [LayerConfig(attention=part, mlp=mlp, norms=ParallelNorms(norm)) for part in attention],
        norm,
        positions=longest_sequence(reader, rope, 8192),
        tied=True,
        logits_divisor=1.0 / reader.positive_number("logit_scale", 0.0625),
    )
