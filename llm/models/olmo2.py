"""OLMo 2: norms on the parts' outputs, queries and keys normalised over all heads together."""

from __future__ import annotations

from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    DecoderForCausalLM,
    GatedMLPConfig,
    LayerConfig,
    PostNorms,
    longest_sequence,
    read_decoder,
    read_heads,
    read_rms_norm,
)


class Olmo2ForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        rope, norm = reader.rope(), read_rms_norm(reader, 1e-5)
        bias = reader.boolean("attention_bias", False)
        layer = LayerConfig(
            attention=AttentionConfig(
                read_heads(reader), rope, qkv_bias=bias, out_bias=bias, qk_norm=norm, qk_norm_over="all heads"
            ),
            mlp=GatedMLPConfig(reader.positive("intermediate_size"), reader.string("hidden_act", "silu")),
            norms=PostNorms(norm),
        )
        return read_decoder(reader, layer, norm, positions=longest_sequence(reader, rope))
