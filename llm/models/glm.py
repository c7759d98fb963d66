"""GLM-4 of 2024: Llama with an interleaved rotary embedding on half of each head."""

from __future__ import annotations

from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    DecoderConfig,
    DecoderForCausalLM,
    GatedMLPConfig,
    LayerConfig,
    NormConfig,
    Norms,
    PreNorms,
    longest_sequence,
    read_decoder,
    read_heads,
    read_rms_norm,
)


class GlmForCausalLM(DecoderForCausalLM):
    @classmethod
    def norms(cls, norm: NormConfig) -> Norms:
        return PreNorms(norm)

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        rope, norm = reader.rope(default_share=0.5), read_rms_norm(reader, 0.00000015625)
        attention = AttentionConfig(
            read_heads(reader, default_kv_heads=2, default_size=128),
            rope,
            rope_interleaved=True,
            qkv_bias=reader.boolean("attention_bias", True),
        )
        mlp = GatedMLPConfig(reader.positive("intermediate_size"), reader.string("hidden_act", "silu"))
        layer = LayerConfig(attention=attention, mlp=mlp, norms=cls.norms(norm))
        return read_decoder(reader, layer, norm, positions=longest_sequence(reader, rope, 131072))
