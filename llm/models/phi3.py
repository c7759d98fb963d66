"""Phi-3 and 3.5: fused projections in the checkpoint, LongRoPE, some with partial rotary embedding."""

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
    read_decoder,
    read_heads,
    read_rms_norm,
)


class Phi3ForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        # transformers reads the key and never adds a bias.
        reader.expect("attention_bias", False)
        # Keys of Phi-4-mini, at the values without effect.
        reader.expect("mlp_bias", False)
        reader.expect("full_attn_mod", 1)
        reader.expect("interpolate_factor", 1)
        rope, norm = reader.rope(), read_rms_norm(reader, 1e-5)
        layer = LayerConfig(
            attention=AttentionConfig(read_heads(reader), rope, reader.optional_integer("sliding_window")),
            mlp=GatedMLPConfig(reader.positive("intermediate_size"), reader.string("hidden_act", "silu")),
            norms=PreNorms(norm),
        )
        return read_decoder(reader, layer, norm, positions=longest_sequence(reader, rope, 4096))
