"""FlexOlmo: OLMo 2 with experts."""

from __future__ import annotations

from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    DecoderForCausalLM,
    LayerConfig,
    MoEConfig,
    PostNorms,
    longest_sequence,
    read_decoder,
    read_heads,
    read_rms_norm,
)
from llm.models.reading_experts import ignore_training


class FlexOlmoForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        ignore_training(reader)
        rope, norm = reader.rope(500_000.0), read_rms_norm(reader)
        bias = reader.boolean("attention_bias", False)
        layer = LayerConfig(
            attention=AttentionConfig(
                read_heads(reader), rope, qkv_bias=bias, out_bias=bias, qk_norm=norm, qk_norm_over="all heads"
            ),
            mlp=MoEConfig(
                reader.positive("num_experts", 7),
                reader.positive("num_experts_per_tok", 5),
                reader.positive("intermediate_size"),
                reader.string("hidden_act", "silu"),
                renormalize=reader.boolean("norm_topk_prob", False),
            ),
            norms=PostNorms(norm),
        )
        return read_decoder(reader, layer, norm, positions=longest_sequence(reader, rope, 4096))
