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
    read_decoder,
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
        return read_decoder(reader, layer, norm, positions=longest_sequence(reader, rope, 131_072))
