"""OLMoE: queries and keys normalised over all heads together, experts in every layer."""

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
from llm.models.reading_experts import ignore_training


class OlmoeForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        ignore_training(reader)
        reader.expect("clip_qkv", None)
        rope, norm = reader.rope(), read_rms_norm(reader, 1e-5)
        bias = reader.boolean("attention_bias", False)
        layer = LayerConfig(
            attention=AttentionConfig(
                read_heads(reader), rope, qkv_bias=bias, out_bias=bias, qk_norm=norm, qk_norm_over="all heads"
            ),
            mlp=MoEConfig(
                reader.positive("num_experts", 64),
                reader.positive("num_experts_per_tok", 8),
                reader.positive("intermediate_size"),
                reader.string("hidden_act", "silu"),
                renormalize=reader.boolean("norm_topk_prob", False),
            ),
            norms=PreNorms(norm),
        )
        return read_decoder(reader, layer, norm, positions=longest_sequence(reader, rope, 4096))
